"""The Triton backend on a GPU: what holds in the interpreter holds here."""

from __future__ import annotations

from tests.backends.triton_suite import (
    test_a_pass_without_tokens_gives_no_rows,
    test_a_row_is_the_same_in_every_cut_and_company,
    test_equals_dense_attention,
)

__all__ = [
    "test_a_pass_without_tokens_gives_no_rows",
    "test_a_row_is_the_same_in_every_cut_and_company",
    "test_equals_dense_attention",
]
