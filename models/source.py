"""Where weights come from: one protocol over checkpoint formats, and its safetensors implementation.

Families ask for weights by their Hugging Face names (`model.layers.0.self_attn.q_proj.weight`); a source for
another format maps those to its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from kernels.packed import FLOAT_FORMATS, PackedWeight, pack_float
from models.base import ModelError

INDEX_NAME = "model.safetensors.index.json"
PICKLED_NAME = "pytorch_model.bin"  # as EAGLE's drafters are published
_SCALE = "_scale"  # behind the name of an int8 matrix


def _text_model_name(name: str) -> str | None:
    """The name of a tensor in the text model alone; None for the vision parts of a multimodal checkpoint."""
    for prefix, replacement in (("language_model.", ""), ("model.language_model.", "model.")):
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    vision = (
        "vision_tower.",
        "multi_modal_projector.",
        "mm_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
        "model.mm_projector.",
        "model.visual.",
    )
    return None if name.startswith(vision) else name


class WeightSource(Protocol):
    """A checkpoint, read one tensor at a time."""

    def names(self) -> set[str]:
        """Hugging Face names of the tensors it has."""

    def packed(self, name: str) -> PackedWeight:
        """The matrix `name` [rows, columns] in the file's own format."""

    def tensor(self, name: str) -> torch.Tensor:
        """The float tensor `name`, any shape: a norm's weight, a bias."""


class SafetensorsSource:
    """Tensors of a folder's .safetensors files, mapped into memory. Raises ModelError naming a file that is bad.

    A file of another name is PyTorch's own, of which nothing but tensors is read.
    """

    def __init__(self, files: Sequence[Path], rename: Callable[[str], str | None] = _text_model_name) -> None:
        """`rename`: from a name in the files to the Hugging Face name of the whole model; None: left out."""
        self._where = files[0].parent
        self._files: dict[str, tuple[safe_open | _PickledFile, str]] = {}
        for path in files:
            try:
                # Opening checks the header, and that the data it speaks of fills the file exactly.
                file = _PickledFile(path) if path.name == PICKLED_NAME else safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise ModelError(f"{path}: no such file") from error
            except (UnpicklingError, RuntimeError) as error:
                raise ModelError(f"{path}: not a PyTorch file of tensors ({error})") from error
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: truncated or corrupt safetensors file ({error})") from error
            names: list[str] = file.keys()
            for name in names:
                known_as = rename(name)
                if known_as is not None:
                    self._files[known_as] = (file, name)

    def names(self) -> set[str]:
        return {name for name in self._files if not name.endswith(_SCALE)}

    def packed(self, name: str) -> PackedWeight:
        weight = self.tensor(name)
        if weight.dtype == torch.int8 and name + _SCALE in self._files:
            return self._blocks(name, weight, self.tensor(name + _SCALE))
        if weight.ndim != 2 or weight.dtype not in FLOAT_FORMATS:
            shape = list(weight.shape)
            raise ModelError(f"{self._where}: {name} is {weight.dtype} {shape}, not a float matrix")
        return pack_float(weight)

    def _blocks(self, name: str, values: torch.Tensor, scales: torch.Tensor) -> PackedWeight:
        """Q8_0 of int8 `values` [rows, columns], every 32 of which in a row share one of float16 `scales`."""
        shape = list(values.shape)
        if (
            values.ndim != 2
            or scales.dtype != torch.float16
            or [shape[0], shape[1] / 32] != list(scales.shape)
        ):
            raise ModelError(
                f"{self._where}: {name} is int8 {shape}, its scales {scales.dtype} {list(scales.shape)}, "
                "not float16 with one for every 32 columns"
            )
        blocks = [scales.unsqueeze(-1).view(torch.uint8), values.view(torch.uint8).unflatten(1, (-1, 32))]
        return PackedWeight("Q8_0", torch.cat(blocks, dim=-1).flatten(1), shape[0], shape[1])

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise ModelError(f"{self._where}: no tensor {name!r}")
        file, own_name = self._files[name]
        return file.get_tensor(own_name)


class _PickledFile:
    """A PyTorch file, mapped into memory, as a safetensors file is read."""

    def __init__(self, path: Path) -> None:
        self._tensors: dict[str, torch.Tensor] = torch.load(
            path, map_location="cpu", mmap=True, weights_only=True
        )

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def safetensors_files(folder: Path, pickled: bool = False) -> tuple[Path, ...]:
    """The weight files of a Hugging Face folder. Raises ModelError for none, or for a shard that is missing.

    pickled: PyTorch's own file will do where there are none.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        return _shards(index)
    single = folder / "model.safetensors"
    if single.is_file():
        return (single,)
    if pickled and (folder / PICKLED_NAME).is_file():
        return (folder / PICKLED_NAME,)
    raise ModelError(
        f"{folder}: neither model.safetensors nor {INDEX_NAME} (other weight formats are not read)"
    )


def _shards(index: Path) -> tuple[Path, ...]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        files = sorted({index.parent / file for file in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not a safetensors index ({error!r})") from error
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file}: missing, though {index.name} lists it")
    return tuple(files)
