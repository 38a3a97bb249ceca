"""The header of a GGUF file: its metadata and where each tensor lies. Nothing in the file is trusted.

Written for speed: a vocabulary of a hundred thousand strings is read in a fraction of a second.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kernels.dequantize import BLOCK_FORMATS
from models.base import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)

_TYPE_NAMES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}
# Values and bytes of a block, for the formats that can be served.
BLOCKS: dict[str, tuple[int, int]] = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2)} | {
    name: (block.values, block.size) for name, block in BLOCK_FORMATS.items()
}

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_KEY_BYTES = 65535
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file. `shape` is in torch's order (rows first), `offset` in bytes from the file's start."""

    name: str
    format: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What a file says of itself. Arrays of numbers are numpy arrays, arrays of strings lists."""

    path: Path
    file_size: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @property
    def architecture(self) -> str:
        return self.require("general.architecture", str)

    def get(self, key: str, kind: type[Any], default: Any = None) -> Any:
        """The value of `key`, or `default` where it is absent. ModelError if it is not of `kind`."""
        value = self.metadata.get(key)
        if value is None:
            return default
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise ModelError(f"{self.path}: metadata {key!r} is {type(value).__name__}, not {kind.__name__}")
        if kind is float and not math.isfinite(float(value)):
            raise ModelError(f"{self.path}: metadata {key!r} is {value}")
        return value

    def require(self, key: str, kind: type) -> Any:
        """The value of `key`. ModelError where it is absent or not of `kind`."""
        value = self.get(key, kind)
        if value is None:
            raise ModelError(f"{self.path}: metadata {key!r} is missing")
        return value


class _Cursor:
    """Reads forward through a buffer and never past its end."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.position = 0

    def error(self, text: str) -> ModelError:
        return ModelError(f"{self.path}: {text} (at byte {self.position})")

    def claim(self, nbytes: int) -> int:
        """Move past `nbytes` and say where they begin."""
        start = self.position
        if nbytes > self.size - start:
            raise self.error(f"the file is truncated or corrupt: {nbytes} more bytes expected")
        self.position = start + nbytes
        return start

    def scalar(self, code: str) -> Any:
        layout = "<" + code
        return struct.unpack_from(layout, self.buffer, self.claim(struct.calcsize(layout)))[0]

    def text(self, limit: int | None = None) -> str:
        length = self.scalar("Q")
        if limit is not None and length > limit:
            raise self.error(f"a name of {length} bytes, at most {limit} are allowed: the file is corrupt")
        start = self.claim(length)
        # Free text in real files is not always whole characters; it must not keep a model from being served.
        return self.buffer[start : start + length].decode("utf-8", "replace")

    def count(self, smallest: int, what: str) -> int:
        """A number of things to come, each at least `smallest` bytes. Refused if they cannot all be in the file."""
        number = self.scalar("Q")
        if number * smallest > self.size - self.position:
            raise self.error(f"{number} {what} announced, more than the file can hold: truncated or corrupt")
        return number

    def texts(self) -> list[str]:
        """An array of strings. The loop is written out: it runs once for each token of a vocabulary."""
        number = self.count(8, "strings")
        buffer, size, position = self.buffer, self.size, self.position
        unpack = struct.Struct("<Q").unpack_from
        found: list[str] = []
        for _ in range(number):
            end = position + 8
            if end > size or (stop := end + unpack(buffer, position)[0]) > size:
                self.position = position
                raise self.error("the file is truncated or corrupt within an array of strings")
            found.append(buffer[end:stop].decode("utf-8", "replace"))
            position = stop
        self.position = position
        return found

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise self.error(f"unknown metadata type {kind}: the file is corrupt or of a newer format")
        item = self.scalar("I")
        if item == _STRING:
            return self.texts()
        if item not in _SCALARS:
            raise self.error(f"an array of type {item} is not supported")
        dtype = np.dtype("<" + _SCALARS[item])
        number = self.count(dtype.itemsize, "numbers")
        start = self.claim(number * dtype.itemsize)
        return np.frombuffer(self.buffer[start : self.position], dtype)


def read_header(path: Path) -> GGUFHeader:
    """Read and check the header of the GGUF file at `path`.

    ModelError, naming the file and what is wrong with it, if it cannot be read, is not GGUF, is truncated or
    corrupt, or holds a tensor of a type that is not supported.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(len(MAGIC))
            if start != MAGIC:
                raise ModelError(f"{path}: not a GGUF file (it begins with {start!r}, not {MAGIC!r})")
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error
    with buffer:
        return _parse(_Cursor(path, buffer))


def _parse(cursor: _Cursor) -> GGUFHeader:
    cursor.claim(len(MAGIC))
    version = cursor.scalar("I")
    if version not in VERSIONS:
        big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        problem = "a big-endian file" if big_endian else f"GGUF version {version}"
        raise cursor.error(
            f"{problem} is not supported; supported: little-endian, versions {VERSIONS[0]} and {VERSIONS[1]}"
        )
    tensor_count = cursor.count(24, "tensors")
    metadata_count = cursor.count(13, "metadata entries")

    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.text(_MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.error(f"metadata {key!r} occurs twice: the file is corrupt")
        metadata[key] = cursor.value(cursor.scalar("I"))

    raw = [_tensor_info(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        raise cursor.error(f"general.alignment is {alignment!r}, not a multiple of 8: the file is corrupt")
    data_start = -(-cursor.position // alignment) * alignment

    tensors: dict[str, TensorInfo] = {}
    for name, format, shape, offset, nbytes in raw:
        start = data_start + offset
        if name in tensors or offset % alignment:
            raise cursor.error(f"tensor {name!r} occurs twice or is misaligned: the file is corrupt")
        if start + nbytes > cursor.size:
            raise ModelError(
                f"{cursor.path}: the file is truncated: tensor {name!r} ends at byte {start + nbytes}, "
                f"the file at {cursor.size}"
            )
        tensors[name] = TensorInfo(name, format, shape, start, nbytes)
    return GGUFHeader(cursor.path, cursor.size, metadata, tensors)


def _tensor_info(cursor: _Cursor) -> tuple[str, str, tuple[int, ...], int, int]:
    """Name, format, shape, offset into the data, and size in bytes of the tensor described next."""
    name = cursor.text(_MAX_KEY_BYTES)
    dimensions = cursor.scalar("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise cursor.error(f"tensor {name!r} has {dimensions} dimensions: the file is corrupt")
    shape = tuple(cursor.scalar("Q") for _ in range(dimensions))[::-1]
    number = cursor.scalar("I")
    format = _TYPE_NAMES.get(number, f"type {number}")
    if format not in BLOCKS:
        raise cursor.error(
            f"tensor {name!r} is {format}, which is not supported; supported: {', '.join(BLOCKS)}"
        )
    values, size = BLOCKS[format]
    if shape[-1] % values or 0 in shape:
        raise cursor.error(f"tensor {name!r} of shape {list(shape)} cannot be {format}: the file is corrupt")
    return name, format, shape, cursor.scalar("Q"), math.prod(shape) // values * size
