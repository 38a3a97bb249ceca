"""A stand-in for the package `flashinfer`, where there is no GPU.

Each call is held against the real package's signature and against what that checks or leaves undefined, noted, and
answered in plain torch from the tables that came with it, so that a wrong table gives a wrong result. Copies that the
real `plan` starts are under way here until an event recorded after it is synchronised: memory that they read from must
not change meanwhile, nor may the wrapper be planned again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from tests.backends.flashinfer_signatures import signatures

HALF = (torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn
LN_2 = 0.6931471805599453


@dataclass
class Copy:
    """A copy from host memory that has been started: where from, and what was to be copied."""

    source: torch.Tensor
    content: torch.Tensor

    def check(self) -> None:
        assert torch.equal(self.source, self.content), (
            "pinned memory changed while a copy from it was in flight"
        )


class StandIn:
    """Has the attributes of the package that backends use. `calls` are (name, arguments), defaults included."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.in_flight: list[tuple[Any, list[Copy]]] = []
        self._signatures = signatures()
        self.BatchPrefillWithPagedKVCacheWrapper = partial(PagedPrefill, self)
        self.BatchPrefillWithRaggedKVCacheWrapper = partial(RaggedPrefill, self)
        self.BatchDecodeWithPagedKVCacheWrapper = partial(PagedDecode, self)
        self.BatchMLAPagedAttentionWrapper = partial(LatentAttention, self)
        self.mla = SimpleNamespace(MLAPlanMetadata=SimpleNamespace(csr=self._csr))

    def bind(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], method: bool = True
    ) -> dict[str, Any]:
        """The arguments of a call, or TypeError if the real callable does not take them."""
        bound = self._signatures[name].bind(*((None,) if method else ()), *args, **kwargs)
        bound.apply_defaults()
        arguments = {key: value for key, value in bound.arguments.items() if key not in ("self", "cls")}
        self.calls.append((name, arguments))
        return arguments

    def named(self, name: str) -> list[dict[str, Any]]:
        """The arguments of the calls of `name` so far."""
        return [arguments for called, arguments in self.calls if called == name]

    def start_copies(self, wrapper: Any, *sources: torch.Tensor) -> None:
        assert all(wrapper is not busy for busy, _ in self.in_flight), (
            "planned again while its copies are in flight"
        )
        self.in_flight.append((wrapper, [Copy(source, source.clone()) for source in sources]))

    def merge_state(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        call = self.bind("merge_state", args, kwargs, method=False)
        v_a, s_a, v_b, s_b = (call[name] for name in ("v_a", "s_a", "v_b", "s_b"))
        assert v_a.shape == v_b.shape and s_a.shape == s_b.shape == v_a.shape[:2]
        assert s_a.dtype == s_b.dtype == torch.float32
        high = torch.maximum(s_a, s_b)
        w_a, w_b = torch.exp2(s_a - high), torch.exp2(s_b - high)
        merged = (v_a.float() * w_a[..., None] + v_b.float() * w_b[..., None]) / (w_a + w_b)[..., None]
        return merged.to(v_a.dtype), high + torch.log2(w_a + w_b)

    def Event(self) -> StandInEvent:
        return StandInEvent(self)

    def _csr(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.bind("MLAPlanMetadata.csr", args, kwargs)


class StandInEvent:
    """Stands for `torch.cuda.Event`: copies started before the last `record` are done after `synchronize`."""

    def __init__(self, stand_in: StandIn) -> None:
        self._stand_in = stand_in
        self._before: list[Any] = []

    def record(self) -> None:
        self._before = list(self._stand_in.in_flight)

    def synchronize(self) -> None:
        still = []
        for started in self._stand_in.in_flight:
            if any(started is done for done in self._before):
                for copy in started[1]:
                    copy.check()
            else:
                still.append(started)
        self._stand_in.in_flight = still


def host_table(table: torch.Tensor) -> list[int]:
    assert table.dtype == torch.int32 and table.device.type == "cpu" and table.is_contiguous()
    return table.tolist()


def spans(indptr: torch.Tensor) -> list[slice]:
    offsets = host_table(indptr)
    assert offsets[0] == 0 and offsets == sorted(offsets)
    return [slice(start, stop) for start, stop in pairwise(offsets)]


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, heads, dim] float32 and the log-sum-exp to base 2, [n, heads], of one request."""
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.float().repeat_interleave(group, 1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q.float(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen.unsqueeze(1), float("-inf"))
    lse = scores.logsumexp(-1)
    return torch.einsum("qhk,khd->qhd", (scores - lse.unsqueeze(-1)).exp(), v), lse / LN_2


def visible(queries: int, keys: int, causal: bool, window_left: int = -1) -> torch.Tensor:
    """[queries, keys] by FlashInfer's rules: the last query row stands at the last key."""
    row, key = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    seen = key <= row if causal else torch.ones(queries, keys, dtype=torch.bool)
    return seen & (key >= row - window_left) if window_left >= 0 else seen


class _Wrapper:
    name: str

    def __init__(self, stand_in: StandIn, *args: Any, **kwargs: Any) -> None:
        self.stand_in = stand_in
        self.made = stand_in.bind(f"{self.name}.__init__", args, kwargs)
        workspace = self.made["float_workspace_buffer"]
        assert workspace.dtype == torch.uint8 and workspace.is_contiguous() and workspace.data_ptr() % 16 == 0
        assert not self.made["use_cuda_graph"]

    def arguments(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return self.stand_in.bind(f"{self.name}.{method}", args, kwargs)

    def check_dtypes(self, plan: dict[str, Any], q: torch.Tensor, *keys: torch.Tensor) -> None:
        assert q.dtype == plan["q_data_type"] and q.dtype in HALF
        for key in keys:
            assert key.dtype == plan["kv_data_type"] and key.dtype in (q.dtype, FP8)


class _Paged(_Wrapper):
    """The wrappers over pages of keys and of values."""

    spec: dict[str, Any]
    requests: list[slice]
    pages: list[slice]

    def check_tables(self, plan: dict[str, Any], indptr: str, indices: str, last_page_len: str) -> None:
        self.pages = spans(plan[indptr])
        last = host_table(plan[last_page_len])
        table = plan[indices]
        assert plan["page_size"] == 1 and last == [1] * len(self.pages)
        assert table.dtype == torch.int32 and table.shape == (self.pages[-1].stop,)
        assert plan["num_qo_heads"] % plan["num_kv_heads"] == 0
        assert plan["pos_encoding_mode"] == "NONE" and isinstance(plan["sm_scale"], float)
        self.slots = table

    def answer(self, arguments: dict[str, Any], seen: list[torch.Tensor]) -> Any:
        q, (k_cache, v_cache) = arguments["q"], arguments["paged_kv_cache"]
        plan, scale = self.spec, self.spec["sm_scale"]
        self.check_dtypes(plan, q, k_cache, v_cache)
        assert (
            q.shape[0] == self.requests[-1].stop and q.shape[1] == plan["num_qo_heads"] and q.is_contiguous()
        )
        for cache in (k_cache, v_cache):
            assert cache.dim() == 4 and cache.shape[1:3] == (1, plan["num_kv_heads"])
            assert int(self.slots.min()) >= 0 and int(self.slots.max()) < cache.shape[0]
        if k_cache.dtype == FP8:
            assert isinstance(arguments["k_scale"], float) and isinstance(arguments["v_scale"], float)
            scale *= arguments["k_scale"]
        keys, values = (cache.squeeze(1).float() for cache in (k_cache, v_cache))
        out, lse = zip(
            *(
                dense(
                    q[rows],
                    keys[self.slots[pages].long()],
                    values[self.slots[pages].long()],
                    mask,
                    scale,
                    plan["logits_soft_cap"],
                )
                for rows, pages, mask in zip(self.requests, self.pages, seen, strict=True)
            ),
            strict=True,
        )
        result = torch.cat(out).mul_(arguments["v_scale"] or 1.0).to(plan["o_data_type"])
        return (result, torch.cat(lse)) if arguments["return_lse"] else result


class PagedPrefill(_Paged):
    name = "BatchPrefillWithPagedKVCacheWrapper"

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self.spec = plan = self.arguments("plan", args, kwargs)
        self.requests = spans(plan["qo_indptr"])
        self.check_tables(plan, "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        assert plan["head_dim_qk"] in (64, 128, 256) and plan["head_dim_vo"] in (None, plan["head_dim_qk"])
        assert plan["packed_custom_mask"] is None
        sizes = [
            (rows.stop - rows.start, pages.stop - pages.start)
            for rows, pages in zip(self.requests, self.pages, strict=True)
        ]
        mask = plan["custom_mask"]
        if mask is None:
            # No kernel says what a window is where a row also sees keys after it.
            assert plan["causal"] or plan["window_left"] == -1
            self.seen = [visible(*size, plan["causal"], plan["window_left"]) for size in sizes]
        else:
            assert mask.dtype == torch.bool and mask.shape == (sum(rows * keys for rows, keys in sizes),)
            assert plan["window_left"] == -1
            parts = mask.split([rows * keys for rows, keys in sizes])
            self.seen = [part.view(size) for part, size in zip(parts, sizes, strict=True)]
        tables = "qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len"
        self.stand_in.start_copies(self, *(plan[table] for table in tables))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer(self.arguments("run", args, kwargs), self.seen)


class PagedDecode(_Paged):
    name = "BatchDecodeWithPagedKVCacheWrapper"

    def plan(self, *args: Any, **kwargs: Any) -> None:
        assert not self.arguments("plan", args, kwargs)["deprecated_positional_args"]
        self.spec = plan = self.arguments("_plan_impl", args, kwargs)
        self.check_tables(plan, "indptr", "indices", "last_page_len")
        self.requests = [slice(row, row + 1) for row in range(len(self.pages))]
        assert self.made["use_tensor_cores"] or plan["fixed_split_size"] is None
        assert plan["head_dim"] in (64, 128, 256)
        if plan["fixed_split_size"] is not None:
            assert self.partial_bytes() <= self.made["float_workspace_buffer"].numel()
        self.stand_in.start_copies(self, plan["indptr"], plan["last_page_len"])

    def partial_bytes(self) -> int:
        """As scheduler.cuh reserves it: 16 rows and heads of a group for each part of a request's keys, in float32."""
        plan = self.spec
        group = plan["num_qo_heads"] // plan["num_kv_heads"]
        assert group <= 16
        parts = sum(-(-(pages.stop - pages.start) // plan["fixed_split_size"]) for pages in self.pages)
        rows = (
            -(-parts * 16 // group)
            if any(pages.stop - pages.start > plan["fixed_split_size"] for pages in self.pages)
            else 0
        )
        return plan["num_qo_heads"] * rows * (plan["head_dim"] + 1) * 4

    def run(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.arguments("run", args, kwargs)
        left = self.spec["window_left"]
        return self.answer(
            arguments, [visible(1, pages.stop - pages.start, True, left) for pages in self.pages]
        )


class RaggedPrefill(_Wrapper):
    name = "BatchPrefillWithRaggedKVCacheWrapper"

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self.spec = plan = self.arguments("plan", args, kwargs)
        self.requests, self.keys = spans(plan["qo_indptr"]), spans(plan["kv_indptr"])
        assert len(self.requests) == len(self.keys)
        self.stand_in.start_copies(self, plan["qo_indptr"], plan["kv_indptr"])

    def run(self, *args: Any, **kwargs: Any) -> Any:
        arguments, plan = self.arguments("run", args, kwargs), self.spec
        q, k, v = arguments["q"], arguments["k"], arguments["v"]
        self.check_dtypes(plan, q, k, v)
        assert q.shape == (self.requests[-1].stop, plan["num_qo_heads"], plan["head_dim_qk"])
        assert k.shape == (self.keys[-1].stop, plan["num_kv_heads"], plan["head_dim_qk"])
        assert v.shape == (*k.shape[:2], plan["head_dim_vo"])
        out, lse = zip(
            *(
                dense(
                    q[rows],
                    k[keys],
                    v[keys],
                    visible(rows.stop - rows.start, keys.stop - keys.start, plan["causal"]),
                    plan["sm_scale"],
                )
                for rows, keys in zip(self.requests, self.keys, strict=True)
            ),
            strict=True,
        )
        result = torch.cat(out).to(plan["o_data_type"])
        return (result, torch.cat(lse)) if arguments["return_lse"] else result


class LatentAttention(_Wrapper):
    name = "BatchMLAPagedAttentionWrapper"

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self.spec = plan = self.arguments("plan", args, kwargs)
        tables = plan["metadata"]
        assert isinstance(tables, dict), "FlashInfer wants an MLAPlanMetadata"
        self.requests, self.pages = spans(tables["qo_indptr"]), spans(tables["kv_indptr"])
        self.slots = tables["kv_indices"]
        assert host_table(tables["kv_len_arr"]) == [pages.stop - pages.start for pages in self.pages]
        assert self.slots.dtype == torch.int32 and self.slots.shape == (self.pages[-1].stop,)
        assert plan["page_size"] == 1 and isinstance(plan["sm_scale"], float)
        assert plan["head_dim_ckv"] % 128 == 0 and plan["head_dim_kpe"] % 64 == 0
        assert plan["kv_data_type"] != FP8 or (plan["q_data_type"], plan["head_dim_ckv"]) == (
            torch.bfloat16,
            512,
        )
        # Beyond this FlashInfer has no room for its work items, a tile of 64 rows and heads each.
        assert self.requests[-1].stop * plan["num_heads"] // 64 <= 16384
        self.stand_in.start_copies(self, *(tables[name] for name in ("qo_indptr", "kv_indptr", "kv_len_arr")))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        arguments, plan = self.arguments("run", args, kwargs), self.spec
        assert arguments["q_nope"] is None and arguments["ckv_cache"] is None, "deprecated"
        q, cache = arguments["query"], arguments["kv_cache"]
        width = plan["head_dim_ckv"] + plan["head_dim_kpe"]
        self.check_dtypes(plan, q, cache)
        assert q.shape == (self.requests[-1].stop, plan["num_heads"], width)
        assert cache.dim() == 3 and cache.shape[1:] == (1, width)
        scales = arguments["ckv_scale"], arguments["kpe_scale"]
        assert all(isinstance(scale, float) for scale in scales) == (cache.dtype == FP8)
        factors = torch.tensor([scale or 1.0 for scale in scales]).repeat_interleave(
            torch.tensor([plan["head_dim_ckv"], plan["head_dim_kpe"]])
        )
        out = []
        scaled = cache.float() * factors
        for rows, pages in zip(self.requests, self.pages, strict=True):
            entries = scaled[self.slots[pages].long()]
            seen = visible(rows.stop - rows.start, pages.stop - pages.start, plan["causal"])
            out.append(
                dense(q[rows], entries, entries[..., : plan["head_dim_ckv"]], seen, plan["sm_scale"])[0]
            )
        return torch.cat(out).to(plan["output_dtype"] or plan["q_data_type"])
