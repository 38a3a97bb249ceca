"""Without a GPU, Triton's kernels run in its interpreter, which it is told before it is first imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
