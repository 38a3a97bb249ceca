"""Qwen3: queries and keys pass through an RMSNorm of their own, over each head, before they are rotated."""

from __future__ import annotations

from models.decoder import Decoder


class Qwen3ForCausalLM(Decoder):
    """Llama's layers with `config.qk_norm`."""
