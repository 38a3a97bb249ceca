"""The kernels for ARM: NEON's are those of plain C++ to the bit. Under emulation, where the machine is none."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.cpu.build import FLAGS, SOURCES, compile_objects, compiler

IS_ARM = platform.machine() in ("aarch64", "arm64")
CROSS_COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")


@pytest.fixture(scope="module")
def agree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of agree.cpp, linked with the whole library's objects."""
    if not IS_ARM and shutil.which(CROSS_COMPILER) is None:
        pytest.skip(f"no {CROSS_COMPILER} here")
    if not IS_ARM and EMULATOR is None:
        pytest.skip("no qemu-aarch64 here")
    folder = tmp_path_factory.mktemp("arm")
    # Linked statically, a program needs no libraries of the other machine's beside it.
    cxx, link = (compiler(), []) if IS_ARM else ([CROSS_COMPILER], ["-static"])
    objects = compile_objects(cxx, folder, FLAGS)
    program, source = folder / "agree", Path(__file__).with_name("agree.cpp")
    command = [*cxx, *FLAGS, *link, f"-I{SOURCES}", str(source), *map(str, objects), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def run(program: Path, case: str, cpu: str = "max") -> str:
    emulate = [] if IS_ARM else [str(EMULATOR), "-cpu", cpu]
    done = subprocess.run([*emulate, str(program), case], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("case", ("linear", "dequantise", "quantise", "rows", "write_kv", "attend", "state"))
def test_neon_computes_what_plain_cpp_does(agree: Path, case: str) -> None:
    run(agree, case)


def test_neon_serves_where_the_processor_has_its_dot_products(agree: Path) -> None:
    assert run(agree, "isa") == "neon"


@pytest.mark.skipif(IS_ARM, reason="an emulator can leave instructions out, a processor cannot")
def test_plain_cpp_serves_where_it_has_not(agree: Path) -> None:
    assert run(agree, "isa", cpu="cortex-a72") == "scalar"
