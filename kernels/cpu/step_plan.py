"""A whole forward pass of a Llama-shaped model as one native call: the step plan.

A plan holds the model's packed weights and the structs that point at them. Its inputs are those of a forward
batch and a KV pool, as tensors: any number of query rows of any number of sequences, prompts, decode and verify
rows mixed. A row's result does not depend, to the bit, on the rows beside it, on the thread count or on where its
slots lie.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec
import torch

from kernels.cpu.kv import KVTensors, NativeKV, native_kv
from kernels.cpu.library import NativeWeight, check, library
from kernels.cpu.linear import native
from kernels.packed import PackedWeight

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """Sizes and constants of a model. `embedding_scale` multiplies embeddings, `attention_scale` scores."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    attention_scale: float
    embedding_scale: float = 1.0
    activation: Literal["silu", "gelu_tanh"] = "silu"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """One layer. Matrices are packed, vectors float32; norm weights as they multiply (Gemma: 1 added).

    cos, sin: [max_positions, head_dim / 2] float32; element i of a head is paired with i + head_dim / 2.
    attention_out_norm, mlp_out_norm: norms on what a sublayer adds to the residual stream.
    q_norm, k_norm: [head_dim] norms on each head before the rotary embedding.
    window: positions a query sees, itself included; None: all.
    causal: queries see no later token, also in a batch that is not causal.
    """

    q: PackedWeight
    k: PackedWeight
    v: PackedWeight
    o: PackedWeight
    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    attention_out_norm: torch.Tensor | None = None
    mlp_out_norm: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    window: int | None = None
    causal: bool = False


class StepBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The flat batch of one pass; see ForwardBatch for the meaning of each field. Tensors are contiguous.

    input_ids, positions, out_slots: [T] int64. logits_rows: [L] int64. slot_table: [rows, width] int32.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_slots: torch.Tensor
    query_lens: Sequence[int]
    context_lens: Sequence[int]
    slot_table: torch.Tensor
    table_rows: Sequence[int]
    logits_rows: torch.Tensor
    kv: KVTensors
    causal: bool = True
    capture_layers: Sequence[int] = ()


class Chosen(NamedTuple):
    """What a pass has chosen for its rows: the best token of each, -1 where its logits are not finite; its probability,
    where that was asked for; and captured states by layer."""

    token_ids: list[int]
    chances: list[float]
    captured: dict[int, torch.Tensor]


_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
_VECTORS = (
    "input_norm",
    "mlp_norm",
    "attention_out_norm",
    "mlp_out_norm",
    "q_norm",
    "k_norm",
    "cos",
    "sin",
)


class _Layer(ctypes.Structure):
    """`Layer` of src/step.h."""

    _fields_ = (
        *((name, NativeWeight) for name in _MATRICES),
        *((name, ctypes.c_void_p) for name in _VECTORS),
        ("window", ctypes.c_int32),
        ("causal", ctypes.c_int32),
    )


class _Model(ctypes.Structure):
    """`Model` of src/step.h."""

    _fields_ = (
        ("num_layers", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("intermediate", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("max_positions", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("attention_scale", ctypes.c_float),
        ("embedding_scale", ctypes.c_float),
        ("layers", ctypes.POINTER(_Layer)),
        ("final_norm", ctypes.c_void_p),
        ("embedding", NativeWeight),
        ("head", NativeWeight),
        ("token_ids", ctypes.c_void_p),
        ("successor_norm", ctypes.c_void_p),
        ("successor", NativeWeight),
    )


class _Batch(ctypes.Structure):
    """`Batch` of src/step.h."""

    _fields_ = (
        ("tokens", ctypes.c_int32),
        ("sequences", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("num_captures", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("table_stride", ctypes.c_int64),
        ("ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("out_slots", ctypes.c_void_p),
        ("logits_rows", ctypes.c_void_p),
        ("query_lens", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("table_rows", ctypes.c_void_p),
        ("slot_table", ctypes.c_void_p),
        ("capture_layers", ctypes.c_void_p),
        ("kv", NativeKV),
        ("logits", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
        ("chances", ctypes.c_void_p),
        ("captures", ctypes.c_void_p),
    )


def unsupported(spec: StepSpec) -> str | None:
    """Why no plan can run a model of these sizes; None where one can."""
    if spec.heads % spec.kv_heads:
        return f"{spec.heads} heads over {spec.kv_heads} KV heads"
    if spec.head_dim % 16:
        return f"head_dim {spec.head_dim} is not a multiple of 16"
    if spec.intermediate % 32:
        return f"intermediate size {spec.intermediate} is not a multiple of 32"
    return None


class StepPlan:
    """The forward pass of one model, bound to its weights. Raises ValueError where `unsupported` has one."""

    def __init__(
        self,
        spec: StepSpec,
        layers: Sequence[LayerWeights],
        embedding: PackedWeight,
        final_norm: torch.Tensor,
        head: PackedWeight,
        token_ids: torch.Tensor | None = None,
        successor: tuple[torch.Tensor, PackedWeight] | None = None,
    ) -> None:
        """token_ids: [head.rows] int64, the token that each row of the head is of, where it is not the row's number.
        successor: norm [hidden] and matrix [hidden, hidden] of a head that adds to a row what the token before it says.
        """
        why_not = unsupported(spec)
        if why_not is not None:
            raise ValueError(f"no native step plan: {why_not}")
        self.spec = spec
        self._num_layers = len(layers)
        self._vocab = head.rows
        self._held: list[object] = [
            embedding,
            head,
            token_ids,
            successor,
            *layers,
        ]  # what the structs point at
        self._layers = (_Layer * len(layers))(*map(self._layer, layers))
        self._model = _Model(
            num_layers=len(layers),
            hidden=spec.hidden,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            intermediate=spec.intermediate,
            activation=_ACTIVATIONS[spec.activation],
            max_positions=min(layer.cos.shape[0] for layer in layers),
            eps=spec.eps,
            attention_scale=spec.attention_scale,
            embedding_scale=spec.embedding_scale,
            layers=self._layers,
            final_norm=self._pointer(final_norm),
            embedding=native(embedding),
            head=native(head),
            token_ids=None if token_ids is None else token_ids.data_ptr(),
        )
        if successor is not None:
            norm, matrix = successor
            self._model.successor_norm, self._model.successor = self._pointer(norm), native(matrix)

    def run(self, batch: StepBatch) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Write the batch's keys and values, and return logits and captured states.

        Logits are [L, head.rows] float32; captures map each of `capture_layers` to the residual stream after that
        layer, [T, hidden] float32. Raises NativeError for ids, positions, slots or lengths out of range.
        """
        logits = torch.empty(batch.logits_rows.shape[0], self._vocab, dtype=torch.float32)
        return logits, self._call(batch, logits=logits.data_ptr())

    def choose(self, batch: StepBatch, chances: bool = False) -> Chosen:
        """As `run`, but only the best token of each row, the lowest id among equals, and with `chances` its
        probability.

        With a successor head the rows of a sequence, equally many for each, go by the token before them, the first
        of them by the one that its pass has there.
        """
        rows = batch.logits_rows.shape[0]
        tokens = torch.empty(rows, dtype=torch.int64)
        found = torch.empty(rows, dtype=torch.float32) if chances else None
        result = {"chosen": tokens.data_ptr()} | ({} if found is None else {"chances": found.data_ptr()})
        captured = self._call(batch, **result)
        return Chosen(tokens.tolist(), [] if found is None else found.tolist(), captured)

    def _call(self, batch: StepBatch, **result: int) -> dict[int, torch.Tensor]:
        sequences = len(batch.query_lens)
        ints = ctypes.c_int32 * sequences
        query_lens, context_lens = ints(*batch.query_lens), ints(*batch.context_lens)
        table_rows = ints(*batch.table_rows)
        tokens, wanted = batch.input_ids.shape[0], batch.capture_layers
        captures = torch.empty(len(wanted), tokens, self.spec.hidden, dtype=torch.float32)
        capture_layers = (ctypes.c_int32 * len(wanted))(*wanted)
        described = _Batch(
            tokens=tokens,
            sequences=sequences,
            outputs=batch.logits_rows.shape[0],
            num_captures=len(wanted),
            causal=batch.causal,
            table_stride=batch.slot_table.shape[1],
            ids=batch.input_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            out_slots=batch.out_slots.data_ptr(),
            logits_rows=batch.logits_rows.data_ptr(),
            query_lens=ctypes.addressof(query_lens),
            context_lens=ctypes.addressof(context_lens),
            table_rows=ctypes.addressof(table_rows),
            slot_table=batch.slot_table.data_ptr(),
            capture_layers=ctypes.addressof(capture_layers),
            kv=native_kv(batch.kv, self._num_layers, self.spec.kv_heads, self.spec.head_dim),
            captures=captures.data_ptr(),
            **result,
        )
        check(library().tandem_step(ctypes.addressof(self._model), ctypes.addressof(described)))
        return {layer: captures[i] for i, layer in enumerate(wanted)}

    def _layer(self, layer: LayerWeights) -> _Layer:
        matrices = {
            name: native(getattr(layer, name), self._padded(getattr(layer, f"{name}_bias")))
            for name in _MATRICES
        }
        vectors = {name: self._pointer(getattr(layer, name)) for name in _VECTORS}
        return _Layer(**matrices, **vectors, window=layer.window or 0, causal=layer.causal)

    def _padded(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """The bias in float32 and whole vectors of 16, held."""
        if bias is None:
            return None
        padded = torch.nn.functional.pad(bias.float(), (0, -bias.shape[0] % 16))
        self._held.append(padded)
        return padded

    def _pointer(self, vector: torch.Tensor | None) -> int | None:
        """Address of the vector in float32, held."""
        if vector is None:
            return None
        vector = vector.float().contiguous()
        self._held.append(vector)
        return vector.data_ptr()
