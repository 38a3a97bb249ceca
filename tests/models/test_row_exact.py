"""A position's logits have the same bits however it is computed: whole, in chunks, one by one, in any company."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from models.base import CausalLM
from models.loader import inspect_model, load_model
from models.options import ModelOptions
from models.weights import Precision
from tests.models.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.models.gguf_files import convert
from tests.models.harness import Sequences
from tests.native import needs_native

LENGTH, BATCH, SPARE = 44, 8, 4
TEXTS = torch.randint(3, 240, (3, LENGTH), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama-biases", "qwen2-window", "qwen3-moe", "gemma3"])
def test_logits_do_not_depend_on_how_tokens_are_fed(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make_checkpoint(name, tmp_path)
    model = load_model(
        inspect_model(ModelOptions(model=str(tmp_path))), torch.device("cpu"), Precision(dtype)
    )
    ids = torch.randint(3, 240, (38,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = Sequences(model).extend({0: ids})[0]

    chunked = Sequences(model)
    assert torch.equal(torch.cat([chunked.extend({0: chunk})[0] for chunk in (ids[:17], ids[17:])]), expected)

    # Decode, and blocks as they are verified, beside another sequence's prompt.
    company = Sequences(model)
    parts = [company.extend({1: ids[::-1], 0: ids[:20]})[0]]
    for start, stop in ((20, 21), (21, 22), (22, 30), (30, 32), (32, 38)):
        parts.append(company.extend({0: ids[start:stop], 2: ids[: stop - start]})[0])
    assert torch.equal(torch.cat(parts), expected)


@dataclass(frozen=True)
class Cold:
    """A model, and what it says of each of TEXTS: computed alone, in one pass, with nothing cached."""

    model: CausalLM
    captured: bool
    logits: list[torch.Tensor]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("llama-biases", Precision(torch.float32), None), id="float32"),
        pytest.param(("gemma3", Precision(torch.bfloat16), None), id="bfloat16"),
        pytest.param(
            ("llama-biases", Precision(torch.float32, native=True), GGMLQuantizationType.Q8_0),
            id="native Q8_0",
            marks=needs_native,
        ),
    ],
)
def cold(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cold:
    name, precision, quantised = request.param
    path = tmp_path_factory.mktemp(name)
    make_checkpoint(name, path)
    if quantised is not None:
        path = convert(path, path / "model.gguf", quantised)
    model = load_model(inspect_model(ModelOptions(model=str(path))), torch.device("cpu"), precision)
    logits = [Sequences(model, captured=precision.native).extend({0: text})[0] for text in TEXTS]
    return Cold(model, precision.native, logits)


@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_neither_history_nor_company_changes_a_bit(cold: Cold, data: st.DataObject) -> None:
    """1 to 8 sequences in chunks, decode steps and verified blocks of 2 to 16 rows whose drafts are right to a point;
    some begin with slots that another one filled, some are preempted and computed again."""
    sequences = Sequences(cold.model, rows=BATCH + SPARE, length=LENGTH, captured=cold.captured)
    lengths = sequences.lengths
    free = list(range(BATCH + SPARE))
    size = data.draw(st.integers(1, BATCH), label="batch")
    texts = {free.pop(): data.draw(st.integers(0, len(TEXTS) - 1)) for _ in range(size)}
    while left := [row for row in texts if lengths[row] < LENGTH]:
        chosen = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True), label="rows")
        if free and data.draw(st.integers(0, 4)) == 0:
            texts[free[-1]] = texts.pop(chosen[0])  # preempted: all anew, in slots of its own
            chosen[0] = free.pop()
        tokens: dict[int, list[int]] = {}
        stand: dict[int, int] = {}
        for row in chosen:
            owner = max((other for other in texts if texts[other] == texts[row]), key=lengths.__getitem__)
            if lengths[row] == 0 and lengths[owner] and data.draw(st.booleans(), label="hit"):
                lengths[row] = hit = data.draw(st.integers(1, min(lengths[owner], LENGTH - 1)))
                sequences.slot_table[row, :hit] = sequences.slot_table[owner, :hit]
            count = data.draw(st.sampled_from([1, 2, 3, 8, 16, 17, 30]), label="tokens")
            block = TEXTS[texts[row]][lengths[row] :][:count]
            stand[row] = data.draw(st.integers(1, len(block))) if len(block) <= 16 else len(block)
            tokens[row] = block[: stand[row]] + [(token + 1) % VOCAB_SIZE for token in block[stand[row] :]]
        drafts = {row: len(block) - 1 for row, block in tokens.items() if len(block) <= 16}
        starts = {row: lengths[row] for row in chosen}
        found = sequences.extend(tokens, drafts)
        sequences.keep(stand)
        for row, start in starts.items():
            expected = cold.logits[texts[row]][start : lengths[row]]
            assert torch.equal(found[row][: stand[row]], expected)
