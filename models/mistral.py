"""Mistral: the plain decoder, every layer with the same sliding window, or none."""

from __future__ import annotations

from models.decoder import Decoder


class MistralForCausalLM(Decoder):
    """Llama's layers; `config.sliding_window` bounds what a query sees."""
