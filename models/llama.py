"""Llama 2 and 3, and the many models of that shape (SmolLM2 among them): the plain decoder, any RoPE scaling."""

from __future__ import annotations

from models.decoder import Decoder


class LlamaForCausalLM(Decoder):
    """RMSNorm, rotary attention with grouped keys, SwiGLU; optional biases as the configuration says."""
