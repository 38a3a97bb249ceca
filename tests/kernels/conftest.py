"""What tests of several native kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernels.cpu import library


@pytest.fixture(params=library.ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this processor has."""
    before = library.isa()
    if not library.set_isa(request.param):
        pytest.skip(f"no {request.param} here")
    yield request.param
    library.set_isa(before)
