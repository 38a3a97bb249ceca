"""One worker's model, KV tensors and attention backends, and how a pass runs through them.

Constructing a runner touches nothing that another component makes; the start-up hooks fill it in order:
`load` → `init_attention_backends` → `init_graphs`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from backends.base import AttentionBackend
from backends.forward import ForwardBatch, ForwardMode, forward_context
from backends.kv_pool import DTYPES, FP8, KVLayout, KVPool
from backends.linear_attention import HybridLinearBackend
from backends.options import AttentionOptions
from backends.registry import BackendError
from backends.setup import AttentionBackends, build_attention_backends, configure_aux_hidden_state_capture
from backends.state_pool import StatePool
from engine.checkpoints import Checkpoint, Checkpoints
from engine.graphs import StepGraph, capture
from engine.memory import available_bytes, num_checkpoints, num_slots
from engine.options import CacheOptions
from engine.request import Request, SamplingParams
from engine.slot_table import SlotTable
from engine.worker import SequenceStep
from kernels.cpu.library import available as native_kernels_available
from kernels.cpu.library import isa
from kernels.cpu.step_plan import Chosen
from models.base import CausalLM
from models.loader import ModelFiles, load_model, resolve_device, resolve_precision
from models.options import ModelOptions

logger = logging.getLogger(__name__)

Role = Literal["target", "draft"]

_CALIBRATION_TOKENS = 128


@dataclass(frozen=True, slots=True)
class PassResult:
    """Logits [L, vocab_size] float32 of the rows that were asked for, and captured hidden states by layer."""

    logits: torch.Tensor
    captured: dict[int, torch.Tensor]


class ModelRunner:
    """The target's or the drafter's side of a pass."""

    def __init__(
        self,
        role: Role,
        files: ModelFiles,
        model_options: ModelOptions,
        cache_options: CacheOptions,
        attention_options: AttentionOptions,
        max_running_requests: int,
        capture_layers: Sequence[int] = (),
        draft_layouts: Callable[[], Sequence[KVLayout]] = tuple,
        target: ModelRunner | None = None,
        scratch_slots: int = 0,
        load_weights: Callable[..., CausalLM] = load_model,
        make_kv_pool: Callable[..., KVPool] = KVPool,
        make_state_pool: Callable[..., StatePool] = StatePool,
        build_backends: Callable[..., AttentionBackends] = build_attention_backends,
        capture_graph: Callable[..., StepGraph | None] = capture,
    ) -> None:
        """`capture_layers` are those whose outputs a drafter will ask of this runner's passes, `draft_layouts` what
        its pools will hold for each slot, asked once all weights are loaded.

        A drafter's runner has a `target`, whose model its weights are loaded for: its pool has the slots of the
        target's, and `scratch_slots` behind them.

        The last four make the runner's parts, each once, when its hook runs.
        """
        self.role = role
        self.files = files
        self.stage = "created"
        self.device = resolve_device(model_options.device)
        self._model_options = model_options
        self._cache_options = cache_options
        self._attention_options = attention_options
        self._max_running_requests = max_running_requests
        self._capture_layers = capture_layers
        self._draft_layouts = draft_layouts
        self._target = target
        self._scratch_slots = scratch_slots
        self._load_weights = load_weights
        self._make_kv_pool = make_kv_pool
        self._make_state_pool = make_state_pool
        self._build_backends = build_backends
        self._capture_graph = capture_graph
        self.model: CausalLM | None = None
        self.kv_pool: KVPool | None = None
        self.state_pool: StatePool | None = None
        self.slot_table: SlotTable | None = None
        self.attn_backend: AttentionBackend | None = None
        self.decode_attn_backend: AttentionBackend | None = None
        self.decode_attn_backend_group: tuple[AttentionBackend, ...] = ()
        self._backends: AttentionBackends | None = None
        self._graph: StepGraph | None = None

    # -- start-up hooks, in order ------------------------------------------------------------------------------

    def load(self) -> None:
        """Load the weights."""
        options = self._model_options
        precision = resolve_precision(
            self.files, options.dtype, self.device, native_kernels_available(), options.quantization
        )
        lender = () if self._target is None else (self._target.model,)
        self.model = self._load_weights(self.files, self.device, precision, *lender)
        self.model.eval()
        self.stage = "runner"

    def init_attention_backends(self) -> None:
        """Allocate the KV tensors and build this worker's own backends.

        Raises ValueError, naming the settings, where there is not so much memory.
        """
        model = self.model
        assert model is not None
        configure_aux_hidden_state_capture(model, self._capture_layers)
        layout = self.kv_layout
        slots, checkpoints = self._pool_sizes()
        rows, state_layout = self._max_running_requests, model.state_layout()
        if state_layout is not None and self.role == "draft":
            raise BackendError(f"{self.files.name} keeps recurrent state, which a drafter cannot roll back")
        try:
            # On a CPU a pool takes memory as it fills: what there is too little of would be missed much later.
            size = self._pool_bytes(slots, rows, checkpoints)
            if self.device.type == "cpu" and size > available_bytes(self.device):
                raise MemoryError(f"they take {size >> 20} MiB")
            self.kv_pool = self._make_kv_pool(layout, slots, self.device)
            self.slot_table = SlotTable(rows, self.max_context_len, self.device)
            if state_layout is not None:
                self.state_pool = self._make_state_pool(state_layout, rows, self.device, checkpoints)
        except (MemoryError, RuntimeError, TypeError) as error:  # TypeError: torch cannot even count so many
            raise ValueError(
                f"{slots} KV slots and {rows} requests at once do not fit in memory: lower --max-total-tokens (or "
                f"--mem-fraction-static) or --max-running-requests ({error})"
            ) from error
        self._backends = self._build_backends(
            options=self._attention_options,
            role=self.role,
            device=self.device,
            layout=layout,
            wrap=None if state_layout is None else HybridLinearBackend,
        )
        self.attn_backend = self._backends.attn_backend
        self.decode_attn_backend = self._backends.decode_attn_backend
        self.decode_attn_backend_group = self._backends.decode_attn_backend_group
        self.stage = "attention_backends"
        logger.info(
            "%s: %s, weights %s, %d KV slots in %s, attention %s/%s",
            self.role,
            self.files.name,
            model.weight_format,
            slots,
            layout.dtype_name,
            self._backends.prefill_attention_backend_str,
            self._backends.decode_attention_backend_str,
        )
        if self._target is None and self.max_context_len < self.context_len:
            logger.warning(
                "contexts end at %d tokens, not at %d: the KV pool has no more slots (--max-total-tokens, "
                "--mem-fraction-static)",
                self.max_context_len,
                self.context_len,
            )

    def init_graphs(self) -> None:
        """Prepare the passes that run most: a native step plan on a CPU, nothing yet on a GPU."""
        assert self.model is not None and self.kv_pool is not None and self.attn_backend is not None
        # A DFlash drafter has no pass over tokens alone; its keys are normed.
        if self.kv_pool.layout.dtype == FP8 and self.files.dflash is None:
            self._calibrate(self.kv_pool)
        # With PD-mux a pass runs on whichever of several backends; a captured one is bound to one of them.
        if not self.decode_attn_backend_group:
            self._graph = self._capture_graph(self.model, self.kv_pool, self.attn_backend)
        self.stage = "ready"

    def close(self) -> None:
        """Let go of everything that start-up made."""
        self._graph = self._backends = self.attn_backend = self.decode_attn_backend = None
        self.decode_attn_backend_group = ()
        self.model = self.kv_pool = self.state_pool = self.slot_table = None
        self.stage = "closed"

    def _calibrate(self, pool: KVPool) -> None:
        """Fit the pool's scales to the keys and values of tokens from all over the vocabulary."""
        assert self.slot_table is not None
        count = min(_CALIBRATION_TOKENS, self.max_context_len)
        vocabulary = self.files.config.vocab_size
        tokens = [index * vocabulary // count for index in range(count)]
        request = Request(
            "calibration", tokens, SamplingParams(), sink=lambda event: None, slots=list(range(count))
        )
        request.table_row = 0
        self.slot_table.write(request.table_row, 0, request.slots)
        with pool.calibrating():
            self.forward(self.batch([SequenceStep(request, count, samples=False)]))

    def time_pass(self, rows: int) -> float:
        """Seconds that a pass over `rows` rows of one sequence takes. For start-up, when all slots are free: it
        writes to the first ones."""
        assert self.slot_table is not None
        request = Request("warm-up", [0], SamplingParams(), sink=lambda event: None, slots=list(range(rows)))
        request.table_row = 0
        self.slot_table.write(request.table_row, 0, request.slots)
        batch = self.batch([SequenceStep(request, 1, samples=True, drafts=(0,) * (rows - 1))])
        start = time.perf_counter()
        if self.choose(batch) is None:
            self.forward(batch)
        return time.perf_counter() - start

    # -- facts -------------------------------------------------------------------------------------------------

    @property
    def context_len(self) -> int:
        """Tokens a request may span by the model and the settings."""
        trained = self.files.config.context_length
        return min(self._model_options.context_length or trained, trained)

    @property
    def max_context_len(self) -> int:
        """The same, but no more than the pool can hold for one request alone."""
        assert self.kv_pool is not None
        return min(self.context_len, self.kv_pool.num_slots)

    @property
    def kv_layout(self) -> KVLayout:
        """What a slot of this worker's pool holds, once the weights are loaded."""
        model = self.model
        assert model is not None
        wanted = self._cache_options.dtype_of(self.role)
        return model.kv_layout(model.kv_dtype if wanted == "auto" else DTYPES[wanted])

    def describe(self) -> dict[str, object]:
        """What `/server_info` says of this worker."""
        pool, backends = self.kv_pool, self._backends
        return {
            "model": self.files.name,
            "dtype": str(self.model.dtype).removeprefix("torch.") if self.model is not None else None,
            "weights": self.model.weight_format if self.model is not None else None,
            "cpu_kernels": isa() if self.device.type == "cpu" and native_kernels_available() else None,
            "prefill_attention_backend": backends.prefill_attention_backend_str if backends else None,
            "decode_attention_backend": backends.decode_attention_backend_str if backends else None,
            "kv_cache_dtype": pool.layout.dtype_name if pool else None,
            "stage": self.stage,
        }

    # -- passes ------------------------------------------------------------------------------------------------

    def batch(self, steps: Sequence[SequenceStep], capture_layers: tuple[int, ...] = ()) -> ForwardBatch:
        """The flat batch of `steps`: each one's pending tokens, then its drafts, with logits for the last rows."""
        assert self.slot_table is not None and self.kv_pool is not None
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        query_lens: list[int] = []
        context_lens: list[int] = []
        prompt_rows: list[int] = []
        draft_rows: list[int] = []
        for step in steps:
            request, start = step.request, step.request.cached_len
            known = start + step.num_tokens
            end = known + len(step.drafts)
            ids += request.token_ids(start, known)
            ids += step.drafts
            positions += range(start, end)
            slots += request.slots[start:end]
            rows += range(len(ids) - self.num_logits_rows(step), len(ids))
            query_lens.append(end - start)
            context_lens.append(end)
            prompt_rows.append(min(max(len(request.prompt_ids) - start, 0), end - start))
            draft_rows.append(len(step.drafts))
        device = self.device
        return ForwardBatch(
            mode=_mode(query_lens, prompt_rows),
            input_ids=_int64(ids, device),
            positions=_int64(positions, device),
            out_slots=_int64(slots, device),
            query_lens=tuple(query_lens),
            context_lens=tuple(context_lens),
            slot_table=self.slot_table.tensor,
            table_rows=tuple(step.request.table_row for step in steps),
            logits_rows=_int64(rows, device),
            kv_pool=self.kv_pool,
            num_prompt_rows=tuple(prompt_rows),
            capture_layers=capture_layers,
            num_draft_rows=tuple(draft_rows),
            prefix_lens=tuple(step.request.prefix_hit_tokens or 0 for step in steps),
            state_pool=self.state_pool,
            state_checkpoints=tuple(step.request.checkpoints for step in steps),
        )

    def num_logits_rows(self, step: SequenceStep) -> int:
        """How many rows of logits `forward` returns for `step`: the last ones of its part of the batch."""
        if step.request.wants_prompt_logprobs:
            return step.num_tokens + len(step.drafts)
        return 1 + len(step.drafts) if step.samples else 0

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> PassResult:
        """Run one pass: replayed where a captured graph fits, else layer by layer, with the same numbers."""
        assert self.model is not None
        if self._graph is not None and self._graph.fits(batch):
            return PassResult(*self._graph.run(batch))
        assert self._backends is not None
        with forward_context(batch, self._backends.for_pass(batch)):
            hidden = self.model(batch)
            logits = self.model.logits(hidden.last[batch.logits_rows])
        return PassResult(logits, dict(hidden.captured))

    def choose(self, batch: ForwardBatch, chances: bool = False) -> Chosen | None:
        """Run one pass that chooses the best token of each of `batch.logits_rows` itself, and with `chances` tells its
        probability. None where no captured pass fits: then only `forward` runs this batch."""
        if self._graph is None or not self._graph.fits(batch):
            return None
        return self._graph.choose(batch, chances)

    def recomputes_exactly(self) -> bool:
        """Whether a token's cache entry has the same bits whenever it is computed. A latent one goes by the method of
        the pass, which is another for decoded tokens than for a prompt's."""
        return not self.kv_layout.is_latent

    def commit_state(self, kept: Mapping[int, int]) -> None:
        """Commit recurrent state after a verify: `kept[table_row]` of the rows of that sequence's block stand."""
        assert self.attn_backend is not None
        commit = self.attn_backend.mamba_commit()
        assert commit is not None, "only a model with recurrent state has any to commit"
        commit(self.state_pool, kept)

    def resume_state(self, table_row: int, checkpoint: Checkpoint) -> None:
        """Let the recurrent state of a sequence that is about to run be the checkpoint."""
        assert self.state_pool is not None
        self.state_pool.resume(table_row, checkpoint.row, checkpoint.position)

    def make_checkpoints(self) -> Checkpoints | None:
        """For a prefix cache: what keeps count of this worker's checkpoints; None without recurrent state."""
        if self.state_pool is None:
            return None
        return Checkpoints(self._cache_options.mamba_track_interval, self.state_pool.checkpoint_rows)

    def _pool_sizes(self) -> tuple[int, int]:
        """Slots of the KV pool, and checkpoints of recurrent state."""
        assert self.model is not None
        if self._target is not None:
            assert self._target.kv_pool is not None
            return self._target.kv_pool.num_slots + self._scratch_slots, 0
        state = self.model.state_layout()
        layouts, options = [self.kv_layout, *self._draft_layouts()], self._cache_options
        context, device = self.context_len, self.device
        if state is None:
            return num_slots(layouts, options, context, device), 0
        size, running = state.bytes_per_checkpoint, state.bytes_per_request * self._max_running_requests
        checkpoints = num_checkpoints(size, layouts, options, context, device, running)
        return num_slots(layouts, options, context, device, running + checkpoints * size), checkpoints

    def _pool_bytes(self, slots: int, rows: int, checkpoints: int) -> int:
        """What the pools of this worker take once they are full, and those that a drafter will make after them."""
        assert self.model is not None
        layouts = [self.kv_layout, *(self._draft_layouts() if self._target is None else ())]
        size, state = slots * sum(layout.bytes_per_slot for layout in layouts), self.model.state_layout()
        if state is not None:
            size += rows * state.bytes_per_request + checkpoints * state.bytes_per_checkpoint
        return size


def _int64(values: Sequence[int], device: torch.device) -> torch.Tensor:
    # Of few numbers numpy makes an array in a third of the time that torch takes.
    return torch.from_numpy(np.array(values, dtype=np.int64)).to(device)


def _mode(query_lens: Sequence[int], prompt_rows: Sequence[int]) -> ForwardMode:
    if list(query_lens) == list(prompt_rows):
        return ForwardMode.EXTEND if query_lens else ForwardMode.IDLE
    if any(prompt_rows):
        return ForwardMode.MIXED
    return ForwardMode.DECODE if max(query_lens) == 1 else ForwardMode.TARGET_VERIFY
