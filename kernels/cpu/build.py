"""Builds the native kernels, `libtandem_cpu.so`, with the C++ compiler at hand.

`python -m kernels.cpu.build` builds in place, as installing does, for the machine that the compiler compiles for:
with CXX a cross compiler and `--output` another place, for another one. `--sanitize` builds a second library with
the address and undefined-behaviour sanitizers and prints the environment that runs tests on it. Standard
library only: `setup.py` imports this module before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
LIBRARY = Path(__file__).parent / "libtandem_cpu.so"
SANITIZED = Path(__file__).parent / "libtandem_cpu_sanitized.so"

FLAGS = [
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-pthread",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
]
SANITIZERS = [
    "-g",
    "-O1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mf16c"]
X86 = {
    "scalar": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": AVX512,
    "avx512_bf16": [*AVX512, "-mavx512bf16"],
    "amx": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"],
}
# Compilers for Apple's processors take their dot products for granted, so what has none says so.
ARM = {"scalar": ["-march=armv8-a"], "neon": ["-march=armv8.2-a+dotprod"]}


class BuildError(Exception):
    """The library cannot be built here. The text says why."""


def compiler() -> list[str]:
    """The C++ compiler: $CXX, else the first of the usual names."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler found (set CXX, or install g++ or clang++)")


def machine(cxx: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """What `cxx` compiles for: flags of every source, and instruction sets with the flags of each.

    Raises BuildError.
    """
    name = _run([*cxx, "-dumpmachine"]).split("-")[0]
    if name in ("x86_64", "amd64"):
        return ["-DTANDEM_HAVE_X86"], X86
    if name in ("aarch64", "arm64"):
        return ["-DTANDEM_HAVE_ARM"], ARM
    return [], {"scalar": []}


def digest() -> str:
    """Of the sources. A library carries that of its own: structs are laid out on both sides of a call."""
    files = sorted(SOURCES.iterdir())
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()[:16]


def compile_objects(cxx: list[str], folder: Path, flags: list[str]) -> list[Path]:
    """Compile all sources into object files in `folder`. Raises BuildError."""
    of_machine, isas = machine(cxx)
    jobs: dict[Path, tuple[Path, list[str]]] = {
        folder / f"{name}.o": (SOURCES / f"{name}.cpp", []) for name in ("pack", "step", "team")
    }
    jobs[folder / "api.o"] = (SOURCES / "api.cpp", [f'-DTANDEM_SOURCES="{digest()}"'])
    for isa, isa_flags in isas.items():
        jobs[folder / f"isa_{isa}.o"] = (SOURCES / "isa.cpp", [f"-DTANDEM_ISA={isa}", *isa_flags])

    def compile_one(job: tuple[Path, tuple[Path, list[str]]]) -> None:
        target, (source, extra) = job
        _run([*cxx, *flags, *of_machine, *extra, "-c", str(source), "-o", str(target)])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, jobs.items()))
    return list(jobs)


def build(output: Path = LIBRARY, *, sanitize: bool = False) -> Path:
    """Compile all sources into the shared library `output`. Raises BuildError."""
    flags = FLAGS + (SANITIZERS if sanitize else [])
    cxx = compiler()
    with tempfile.TemporaryDirectory() as folder:
        objects = compile_objects(cxx, Path(folder), flags)
        # Linked beside its place and then moved: a process that has the old one mapped keeps it.
        linked = output.with_suffix(f".{os.getpid()}.tmp")
        _run([*cxx, *flags, "-shared", *map(str, objects), "-o", str(linked)])
        linked.replace(output)
    return output


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error}") from error
    if done.stderr:
        print(done.stderr, file=sys.stderr)
    if done.returncode != 0:
        raise BuildError(f"`{shlex.join(command)}` failed")
    return done.stdout


def main() -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.cpu.build", description="Build the native CPU kernels."
    )
    parser.add_argument("--sanitize", action="store_true", help="build with sanitizers, print how to use it")
    parser.add_argument("--output", type=Path, help="where the library goes, if not in its place")
    options = parser.parse_args()
    output = options.output or (SANITIZED if options.sanitize else LIBRARY)
    try:
        build(output, sanitize=options.sanitize)
    except BuildError as error:
        sys.exit(f"error: {error}")
    if not options.sanitize:
        print(output)
        return
    runtimes = [
        subprocess.check_output([*compiler(), f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    # Python itself leaks by design at exit, so leak detection is off.
    print(f"LD_PRELOAD={':'.join(runtimes)} ASAN_OPTIONS=detect_leaks=0 TANDEM_CPU_LIBRARY={output}")


if __name__ == "__main__":
    main()
