"""DFlash drafter: a few layers that draft a whole block of tokens in one pass (z-lab, arXiv 2602.06036).

It sees a token in one of two ways. The *context pass* turns what the target computed for a known token into the
keys and values of every layer here. The *block pass* is a pass like any decoder's, over the last token and
`block_size - 1` mask tokens at the positions behind it: each of them sees the context and all of the block, and
its logits are those of the token *at* its own position. A drafter that has a `successor` then goes through a block
token by token: each one adds to the logits of the next what it says about it (speculative/training/model.py).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from backends.forward import forward_context, get_forward_context
from backends.kv_pool import KVPool
from kernels.cpu.context_plan import ContextPlan
from kernels.cpu.kv import KV_DTYPES
from kernels.cpu.linear import is_packed
from kernels.linear import select_rows
from models.base import ModelError
from models.config import ModelConfig
from models.context import key_value_rows
from models.decoder import Decoder
from models.dflash_config import DFlashConfig
from models.layers import DecoderLayer, Embedding, Linear, RMSNorm
from models.rotary import Rotation, rotate
from models.weights import Weights


class DFlashLayer(DecoderLayer):
    """Qwen3's. Where `causal`, rows of a block see no later row, though the pass would let them."""

    causal = False

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        if not self.causal:
            return super().forward(hidden, rotation)
        outer = get_forward_context()
        with forward_context(replace(outer.batch, causal=True), outer.backend):
            return super().forward(hidden, rotation)


class Successor(torch.nn.Module):
    """What a token says about the next one: from its embedding to what that adds to the next one's hidden state."""

    def __init__(self, norm: RMSNorm, proj: Linear) -> None:
        super().__init__()
        self.norm, self.proj = norm, proj

    def forward(self, embedded: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.proj(self.norm(embedded))
        return out


class DFlashDrafter(Decoder):
    """Borrows the embedding and the head of its target, or some rows of that head.

    draft_token_ids: [L] int64, the target's ids of the tokens that it can draft, in the order of its logits
        ([…, L]). None: it has the target's whole vocabulary.
    """

    layer_class = DFlashLayer

    def __init__(self, config: ModelConfig, dflash: DFlashConfig, source: Weights, target: Decoder) -> None:
        token_ids = None
        embedding, head = target.embed_tokens, target.lm_head
        if dflash.input_embedding_scale is not None:
            embedding = Embedding(embedding.weight, target.dtype, dflash.input_embedding_scale)
        if dflash.draft_vocab_size is not None:
            token_ids = source.token_ids("model.draft_token_ids", dflash.draft_vocab_size, config.vocab_size)
            (weight,) = head.weights
            head = Linear((select_rows(weight, token_ids),))
        super().__init__(config, source, (embedding, head))
        self.draft_token_ids = token_ids
        self.block_size = dflash.block_size
        self.short_block_size = dflash.short_block_size or dflash.block_size
        self.mask_token_id = dflash.mask_token_id
        self.target_layer_ids = dflash.target_layer_ids
        hidden, eps = config.hidden_size, config.rms_norm_eps
        width = len(dflash.target_layer_ids) * hidden
        self.fc = Linear.load(source, "model", ("fc",), (hidden,), width, bias=False)
        self.hidden_norm = RMSNorm(source.vector("model.hidden_norm.weight", hidden), eps)
        attentions = []
        for layer_id, layer in enumerate(self.layers):
            assert isinstance(layer, DFlashLayer)
            layer.causal = dflash.is_causal(layer_id, config)
            attentions.append(layer.self_attn)
        rows = config.num_kv_heads * config.head_dim
        self._context_kv = key_value_rows([attention.qkv_proj for attention in attentions], rows)
        k_norms = [attention.k_norm.weight for attention in attentions if attention.k_norm is not None]
        if not k_norms:
            raise ModelError(f"{source.where}: a DFlash drafter needs norms on its keys (model_type qwen3)")
        self._k_norms = RMSNorm(torch.stack(k_norms).unsqueeze(1), eps)
        self.successor: Successor | None = None
        if source.has("model.successor.weight"):
            self.successor = Successor(
                RMSNorm(source.vector("model.successor_norm.weight", hidden), eps),
                Linear.load(source, "model", ("successor",), (hidden,), hidden, bias=False),
            )
        self._context_plan = self._native_context()

    @property
    def context_length(self) -> int:
        """Positions that it can draft for end before this one."""
        return self.config.context_length

    @torch.inference_mode()
    def successor_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """What tokens add to the logits of those that follow them: [N] int64 to [N, L] float32."""
        assert self.successor is not None
        return self.logits(self.successor(self.embed_tokens(token_ids)))

    @torch.inference_mode()
    def write_context(
        self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, pool: KVPool
    ) -> None:
        """Write the keys and values that T known tokens have here.

        features: [T, len(target_layer_ids) * hidden_size], the outputs of those layers of the target, one beside
            the other. positions, slots: [T] int64. `pool` is this drafter's.
        """
        if self._context_plan is not None and pool.layout.dtype in KV_DTYPES:
            self._context_plan.run(features, positions, slots, pool.tensors())
            return
        (rope,) = self.ropes
        hidden = self.hidden_norm(self.fc(features))
        heads = self._context_kv(hidden).unflatten(
            -1, (len(self.layers), 2, self.config.num_kv_heads, self.config.head_dim)
        )
        cos, sin = rope(positions)
        keys, values = heads.unbind(2)
        keys = rotate(self._k_norms(keys), (cos.unsqueeze(1), sin.unsqueeze(1)))
        for layer_id in range(len(self.layers)):
            pool.write(layer_id, slots, keys[:, layer_id], values[:, layer_id])

    def _native_context(self) -> ContextPlan | None:
        """The context pass as one native call; None where its matrices are not two packed ones, or heads no whole
        vectors."""
        weights = (*self.fc.weights, *self._context_kv.weights)
        if len(weights) != 2 or not all(is_packed(weight) for weight in weights) or self.config.head_dim % 16:
            return None
        (rope,) = self.ropes
        norm, k_norms = self.hidden_norm.weight, self._k_norms.weight.squeeze(1)
        bias = self._context_kv.bias
        return ContextPlan(*weights, bias, norm, k_norms, rope.cos, rope.sin, self.config.rms_norm_eps)
