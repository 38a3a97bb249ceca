"""Native matrix products: nothing lost in packing, errors bounded by int8 activations, rows exact to the bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import library
from kernels.cpu.linear import can_pack, dequantize, linear, pack, select_rows, slice_rows
from kernels.packed import PackedWeight, pack_float
from tests.native import needs_native

pytestmark = needs_native

QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ROWS, COLUMNS = 37, 512  # the last tile of 16 rows is not full


def file_weight(name: str, rows: int = ROWS, columns: int = COLUMNS, byte: int | None = None) -> PackedWeight:
    """A matrix as a file holds it: random integers and sub-scales, or all their bytes alike; scales of a usual size."""
    generator = np.random.default_rng(len(name) + rows)
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    blocks = generator.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    if byte is not None:
        blocks[:] = byte

    def scale() -> np.ndarray:
        halves = (generator.standard_normal((rows, columns // block, 1)) * 0.02).astype(np.float16)
        return halves.view(np.uint8)

    if name == "Q6_K":
        blocks[..., 208:210] = scale()
    else:
        blocks[..., 0:2] = scale()
    if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        blocks[..., 2:4] = scale()
    return PackedWeight(name, torch.from_numpy(blocks.reshape(rows, -1)), rows, columns)


def reference(weight: PackedWeight) -> torch.Tensor:
    """The same matrix by the gguf package."""
    values = quants.dequantize(weight.data.numpy(), GGMLQuantizationType[weight.format])
    return torch.from_numpy(values.reshape(weight.rows, weight.columns).copy())


def float_weight(dtype: torch.dtype) -> PackedWeight:
    torch.manual_seed(1)
    return pack_float(torch.randn(ROWS, 75).to(dtype))  # columns need not be a multiple of anything


def inputs(rows: int, columns: int = COLUMNS) -> torch.Tensor:
    torch.manual_seed(rows)
    return torch.randn(rows, columns) * torch.logspace(-3, 2, rows)[:, None]


@pytest.mark.parametrize("name", QUANTISED)
def test_packing_loses_nothing(isa: str, name: str) -> None:
    weight = file_weight(name)
    assert torch.equal(dequantize(pack(weight)), reference(weight))


@pytest.mark.parametrize("dtype", FLOATS)
def test_packing_floats_loses_nothing(isa: str, dtype: torch.dtype) -> None:
    weight = float_weight(dtype)
    assert torch.equal(dequantize(pack(weight)), weight.data.float())


def test_rows_are_looked_up_in_the_order_asked() -> None:
    weight = file_weight("Q8_0")
    rows = torch.tensor([36, 0, 17, 17])
    assert torch.equal(dequantize(pack(weight), rows), reference(weight)[rows])


@pytest.mark.parametrize("name", (*QUANTISED, *FLOATS))
def test_selected_rows_are_those_rows_packed_alone(name: str | torch.dtype) -> None:
    weight = file_weight(name) if isinstance(name, str) else float_weight(name)
    rows = torch.tensor([36, 0, 17, 17, 3, 35, *range(20, 35)])
    alone = PackedWeight(weight.format, weight.data[rows], len(rows), weight.columns)
    assert torch.equal(select_rows(pack(weight), rows).data, pack(alone).data)
    with pytest.raises(library.NativeError):
        select_rows(pack(weight), torch.tensor([ROWS]))


def test_each_matrix_has_whole_cache_lines_of_its_own() -> None:
    weights = [pack(file_weight(name, rows)).data for name in QUANTISED for rows in (16, 37, 3000)]
    places = sorted((data.data_ptr(), data.data_ptr() + data.nbytes) for data in weights)
    assert all(start % 64 == 0 for start, _ in places)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


@pytest.mark.parametrize("name", QUANTISED)
def test_error_is_within_that_of_int8_activations(isa: str, name: str) -> None:
    weight = file_weight(name)
    matrix, x = reference(weight).double(), inputs(19)
    exact = x.double() @ matrix.T
    # Rounding moves an activation by half a step at most, a step being a 127th of the group's largest.
    step = x.double().unflatten(-1, (-1, 32)).abs().amax(-1) / 127
    bound = (step / 2) @ matrix.abs().unflatten(-1, (-1, 32)).sum(-1).T
    slack = 1e-4 * (x.double().abs() @ matrix.abs().T)  # float32 sums
    error = (linear(x, pack(weight)).double() - exact).abs()
    assert (error <= bound + slack).all()


@pytest.mark.parametrize("name", QUANTISED)
def test_activations_that_int8_holds_are_not_rounded(isa: str, name: str) -> None:
    weight = file_weight(name)
    x = torch.randint(-127, 128, (5, COLUMNS)).float()
    x[:, ::32] = 127.0
    exact = x.double() @ reference(weight).double().T
    tolerance = 1e-6 * (x.double().abs() @ reference(weight).double().abs().T)
    assert ((linear(x, pack(weight)).double() - exact).abs() <= tolerance).all()


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_sums_have_room_for_the_largest_products(isa: str, name: str, byte: int) -> None:
    weight = file_weight(name, byte=byte)
    x = torch.full((4, COLUMNS), 127.0) * torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]
    x[2:, 1::2] *= -1
    found, exact = linear(x, pack(weight)).double(), x.double() @ reference(weight).double().T
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_float_weights_multiply_unrounded_activations(isa: str, dtype: torch.dtype) -> None:
    weight = float_weight(dtype)
    x = inputs(9, 75)
    exact = x.double() @ weight.data.double().T
    tolerance = 1e-5 * (x.double().abs() @ weight.data.double().abs().T)
    assert ((linear(x, pack(weight)).double() - exact).abs() <= tolerance).all()


def test_zero_rows_of_activations_give_zeros(isa: str) -> None:
    product = linear(torch.zeros(3, COLUMNS), pack(file_weight("Q4_1")))
    assert torch.equal(product, torch.zeros(3, ROWS))


@pytest.mark.parametrize("name", (*QUANTISED, *map(str, FLOATS)))
def test_a_row_does_not_depend_on_its_company(isa: str, name: str) -> None:
    weight = (
        file_weight(name) if name in QUANTISED else float_weight(FLOATS[list(map(str, FLOATS)).index(name)])
    )
    packed = pack(weight)
    x = inputs(300, weight.columns)  # more than the rows that go through together
    together = linear(x, packed)
    for count in (1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 257):
        assert torch.equal(linear(x[:count], packed), together[:count])
    for row in (1, 7, 15, 16, 299):
        assert torch.equal(linear(x[row : row + 1], packed), together[row : row + 1])


@pytest.mark.parametrize("name", QUANTISED)
def test_rows_of_more_groups_than_are_unpacked_at_once_are_exact(isa: str, name: str) -> None:
    for columns in (1024,) if name.endswith("K") else (32, 800, 1568):  # 1, 25 and 49 groups
        packed, x = pack(file_weight(name, columns=columns)), inputs(33, columns)
        alone = torch.cat([linear(row[None], packed) for row in x])
        assert torch.equal(linear(x, packed), alone)


PACKED = {name: pack(file_weight(name)) for name in QUANTISED} if library.available() else {}


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(QUANTISED),
    order=st.lists(st.integers(0, 39), min_size=1, max_size=40),
    threads=st.integers(1, 5),
)
def test_rows_are_exact_in_any_order_on_any_number_of_threads(
    name: str, order: list[int], threads: int
) -> None:
    x = inputs(40)
    expected = linear(x, PACKED[name])
    before = library.threads()
    library.set_threads(threads)
    try:
        assert torch.equal(linear(x[order], PACKED[name]), expected[order])
    finally:
        library.set_threads(before)


def test_instruction_sets_agree_to_the_bit() -> None:
    """Integer sums are exact and floats are fused alike, so products are one result, whoever computes them."""
    before, x, products = library.isa(), inputs(21), []
    for name in library.ISAS:
        if library.set_isa(name):
            products.append(torch.cat([linear(x, packed) for packed in PACKED.values()]))
    library.set_isa(before)
    assert all(torch.equal(product, products[0]) for product in products)


def test_a_slice_of_rows_shares_the_memory_of_the_whole() -> None:
    packed = pack(file_weight("Q5_K"))
    x = inputs(6)
    part = slice_rows(packed, 16, 21)
    assert torch.equal(linear(x, part), linear(x, packed)[:, 16:37])
    assert part.data.untyped_storage().data_ptr() == packed.data.untyped_storage().data_ptr()
    with pytest.raises(ValueError, match="row 8"):
        slice_rows(packed, 8, 16)


def test_what_cannot_be_computed_is_refused() -> None:
    packed = pack(file_weight("Q4_0"))
    with pytest.raises(ValueError, match="float32"):
        linear(torch.zeros(1, COLUMNS, dtype=torch.bfloat16), packed)
    with pytest.raises(ValueError, match="512"):
        linear(torch.zeros(1, COLUMNS + 1), packed)
    with pytest.raises(library.NativeError):
        dequantize(packed, torch.tensor([ROWS]))
    unknown = PackedWeight("Q2_K", torch.zeros(1, 84, dtype=torch.uint8), 1, 256)
    assert not can_pack(unknown)
    with pytest.raises(ValueError, match="Q2_K"):
        pack(unknown)


def test_an_unknown_instruction_set_changes_nothing() -> None:
    before = library.isa()
    assert not library.set_isa("abacus")
    assert library.isa() == before
