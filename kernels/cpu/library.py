"""Loads the native CPU kernels: a shared library called through ctypes, by raw pointers.

ctypes releases the interpreter's lock for the length of each call. The library depends on nothing of torch's.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from kernels.cpu.build import LIBRARY, digest

# The numbers of src/kernels.h.
FORMATS = {
    name: number
    for number, name in enumerate(
        ("F32", "BF16", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
    )
}

ISAS = ("amx", "avx512_bf16", "avx512", "avx2", "neon", "scalar")


class NativeWeight(ctypes.Structure):
    """`Weight` of src/kernels.h."""

    _fields_ = (
        ("format", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class NativeError(Exception):
    """A native call refused its arguments, or ran out of memory."""


# `StepStatus` of src/step.h, less success.
_FAILURES = {
    1: "a token id is outside the vocabulary",
    2: "a position is beyond the rotary table",
    3: "a slot is outside the KV pool",
    4: "the lengths of a batch contradict each other",
    5: "no memory for the workspace of a pass",
}


def check(status: int) -> None:
    """Raise NativeError where a call returned other than success."""
    if status != 0:
        raise NativeError(_FAILURES[status])


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or the reason why there is none.

    TANDEM_CPU_LIBRARY names another build of it, TANDEM_CPU_ISA the instruction set to use.
    """
    path = Path(os.environ.get("TANDEM_CPU_LIBRARY", LIBRARY))
    if not path.exists():
        return f"{path.name} has not been built (python -m kernels.cpu.build; it needs a C++20 compiler)"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path.name} cannot be loaded: {error}"
    pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    signatures = {
        "tandem_sources": (ctypes.c_char_p, ()),
        "tandem_set_isa": (int32, (ctypes.c_char_p,)),
        "tandem_isa": (ctypes.c_char_p, ()),
        "tandem_team_size": (int32, ()),
        "tandem_set_team_size": (None, (int32,)),
        "tandem_use_large_pages": (None, (pointer, int64)),
        "tandem_packed_bytes": (int64, (int32, int32, int32)),
        "tandem_pack": (None, (int32, int32, int32, pointer, pointer)),
        "tandem_dequantise_rows": (int32, (pointer, pointer, int32, pointer)),
        "tandem_select_rows": (int32, (pointer, pointer, int32, pointer)),
        "tandem_linear": (int32, (pointer, pointer, int32, pointer)),
        "tandem_linear_by_expert": (int32, (pointer, int64, pointer, int32, pointer, pointer)),
        "tandem_step": (int32, (pointer, pointer)),
        "tandem_context": (int32, (pointer, pointer)),
        "tandem_attention": (int32, (pointer,)),
        "tandem_recur": (int32, (pointer,)),
        "tandem_convolve": (int32, (pointer,)),
    }
    another = f"{path.name} is of another version (python -m kernels.cpu.build makes it anew)"
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name, None)
        if function is None:
            return another
        function.restype, function.argtypes = result, arguments
    if library.tandem_sources().decode() != digest():
        return another
    wanted = os.environ.get("TANDEM_CPU_ISA")
    if wanted and not library.tandem_set_isa(wanted.encode(errors="replace")):
        return f"TANDEM_CPU_ISA={wanted}: this processor has no such instruction set (of {', '.join(ISAS)})"
    library.tandem_set_team_size(physical_cores())
    return library


def available() -> bool:
    """Whether the native kernels can be used in this process."""
    return not isinstance(_load(), str)


def reason() -> str | None:
    """Why the native kernels cannot be used; None where they can."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


def library() -> ctypes.CDLL:
    """The loaded library. Raises RuntimeError where there is none."""
    loaded = _load()
    if isinstance(loaded, str):
        raise RuntimeError(f"native CPU kernels: {loaded}")
    return loaded


def isa() -> str:
    """Instruction set in use: one of ISAS, the best this processor has unless `set_isa` chose."""
    return library().tandem_isa().decode()


def set_isa(name: str) -> bool:
    """Use the kernels of `name`, one of ISAS, from now on; False, and no change, where the processor lacks it.

    Not while a pass runs. Bits of float results may differ between instruction sets.
    """
    return bool(library().tandem_set_isa(name.encode()))


def threads() -> int:
    """Size of the thread team."""
    return library().tandem_team_size()


def set_threads(count: int) -> None:
    """Set the size of the thread team, the calling thread included. Results do not depend on it."""
    library().tandem_set_team_size(count)


def use_large_pages(address: int, size: int) -> None:
    """Ask for pages of 2 MB for memory that has not been written to yet. Nothing happens where there are none."""
    library().tandem_use_large_pages(address, size)


def physical_cores() -> int:
    """Physical cores this process may run on: a second thread on a core adds no bandwidth, nor multipliers."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    return len(cores)
