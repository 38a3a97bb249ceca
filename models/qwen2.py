"""Qwen2 and Qwen2.5: biases on q, k and v; layers from `max_window_layers` on may slide."""

from __future__ import annotations

from models.decoder import Decoder


class Qwen2ForCausalLM(Decoder):
    """Llama's layers with `config.attention_bias`, and no bias on the output projection."""
