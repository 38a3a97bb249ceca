"""Builds the native CPU kernels when the package is installed. All else is in pyproject.toml.

Where they cannot be built (no compiler, say) the install goes on without them, and the torch paths serve.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent))  # a build frontend does not run us from here

from kernels.cpu.build import LIBRARY, BuildError, build


class BuildKernels(build_ext):
    """Compiles kernels/cpu/src, in place for an editable install."""

    def get_ext_filename(self, fullname: str) -> str:
        """The library's own name: it is loaded by ctypes and is no Python module."""
        return str(Path(*fullname.split(".")[:-1], LIBRARY.name))

    def build_extension(self, ext: Extension) -> None:
        """Build, or say why not."""
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            build(output)
        except BuildError as error:
            self.warn(f"native CPU kernels were not built, torch will serve instead: {error}")


# `optional`: setuptools, too, goes on where the library is missing in the end.
setup(
    ext_modules=[Extension("kernels.cpu.libtandem_cpu", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels},
)
