"""What has to be said before a library is first imported: that torch's threads do not spin, which two processes of
tests on two cores would wait for, and, without a GPU, that Triton's kernels run in its interpreter."""

from __future__ import annotations

import os

import app  # noqa: F401  # says the first

# isort: split
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
