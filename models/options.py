"""Frozen settings of a model: which one, and how it is held."""

from __future__ import annotations

from typing import Literal

import msgspec

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["int8", "int4"]


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`model` is a .gguf file, a Hugging Face folder or a hub id. `device` auto takes the GPU where there is one."""

    model: str
    dtype: Dtype = "auto"
    quantization: Quantization | None = None  # of float weights, at load; None: as the checkpoint has them
    device: str = "auto"
    context_length: int | None = None  # None: what the model was trained for
    chat_template: str | None = None  # a Jinja file that replaces the model's own
