"""A run: it learns, it can be killed at any moment, and what it says of the accept length is true."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from engine.runner import ModelRunner
from speculative.training.data import Blocks, Example, blocks_at, held_out
from speculative.training.evaluation import accept_length
from speculative.training.options import TrainingOptions
from speculative.training.report import Facts, plot, write_card, write_plots
from speculative.training.start import decoder, shape_for, state_layer_ids
from speculative.training.states import TargetStates
from speculative.training.trainer import Progress, Trainer

MASK = 256
OPTIONS = TrainingOptions(
    layers=1,
    block_size=4,
    draft_vocab_size=64,
    steps=160,
    warmup_steps=10,
    learning_rate=3e-3,
    soft_share=0.1,  # the texts here are not what this target would write
    anchors_per_step=64,
    anchors_per_example=8,
    checkpoint_seconds=10,
    evaluate_seconds=50,
)


@pytest.fixture
def trainer(runner: ModelRunner, examples: list[Example]) -> Callable[..., Trainer]:
    def make(folder: Path, options: TrainingOptions = OPTIONS) -> Trainer:
        target = decoder(runner.model)
        shape = shape_for(target, options, MASK)
        states = TargetStates(runner, state_layer_ids(shape), examples, folder / "states", 1 << 30)
        seconds: Iterator[float] = iter(range(10**6))  # a step takes one
        return Trainer(target, shape, examples, states, folder, options, clock=lambda: next(seconds))

    return make


def test_loss_falls_and_accept_length_rises_on_text_that_was_held_out(
    trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    run = trainer(tmp_path)
    best: list[bool] = []
    run.run(on_evaluation=lambda progress: best.append(progress.is_best))
    losses = [loss for _, loss in run.progress.losses]
    lengths = [length for _, length in run.progress.accept_lengths]
    assert losses[-1] < losses[0] / 2
    assert lengths[0] < 1.5
    assert lengths[-1] > 2.2
    assert best == [length == max(lengths[: i + 1]) for i, length in enumerate(lengths)]
    assert run.progress.best == max(lengths)
    assert run.share_done == 1.0


def test_what_is_to_be_foreseen_is_the_targets_distribution_and_the_texts_token(
    trainer: Callable[..., Trainer], reference: LlamaForCausalLM, examples: list[Example], tmp_path: Path
) -> None:
    run = trainer(tmp_path, TrainingOptions(layers=1, block_size=4, draft_vocab_size=40, soft_share=0.3))
    members, anchors = [2, 5], [np.array([9, 14]), np.array([20, 33])]
    blocks = blocks_at(examples, members, anchors, 4)
    known = blocks.tokens[:, :, 1:] >= 0
    assert not known.all()  # the last block reaches behind its text
    head = reference.lm_head.weight.detach()[run.draft_token_ids]
    expected = []
    for sequence, anchor, offset in known.nonzero().tolist():
        position = int(anchors[sequence][anchor]) + offset  # of the token before the one that is foreseen
        ids = torch.tensor(examples[members[sequence]].ids, dtype=torch.int64)
        with torch.no_grad():
            logits = reference(ids[None, : position + 1]).logits[0, -1]
        soft = logits[run.draft_token_ids].softmax(-1) @ head
        column = (run.draft_token_ids == ids[position + 1]).nonzero()
        expected.append(0.3 * soft + 0.7 * head[column[0, 0]] if len(column) else soft)
    columns = [bool((run.draft_token_ids == token).any()) for token in blocks.tokens[:, :, 1:][known]]
    assert any(columns) and not all(columns)
    states = run.states.padded(members)
    found = run.wanted(blocks, states, known).float()
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=0.05 * float(head.std()))


class Killed(BaseException):
    pass


def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    options = TrainingOptions(
        **{name: getattr(OPTIONS, name) for name in OPTIONS.__struct_fields__} | {"steps": 30}
    )
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = trainer(tmp_path / "whole", options)
    whole.run()

    def kill(progress: Progress) -> None:
        if progress.step == 17:  # some steps behind the last checkpoint
            raise Killed

    with pytest.raises(Killed):
        trainer(tmp_path / "killed", options).run(on_step=kill)
    (tmp_path / "killed" / "training.pt.partial").write_bytes(b"half of a checkpoint")
    resumed = trainer(tmp_path / "killed", options)
    assert 0 < resumed.progress.step < 17
    resumed.run()
    assert resumed.progress.losses == whole.progress.losses
    for (name, left), right in zip(
        whole.drafter.state_dict().items(), resumed.drafter.state_dict().values(), strict=True
    ):
        assert torch.equal(left, right), name


def test_a_run_is_not_continued_with_another_shape(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    trainer(tmp_path, TrainingOptions(layers=1, steps=1, minutes=0)).save()
    with pytest.raises(ValueError, match="another shape.*num_layers was 1"):
        trainer(tmp_path, TrainingOptions(layers=2, steps=1))


def test_lengths_of_other_texts_are_not_compared(
    trainer: Callable[..., Trainer], tmp_path: Path, runner: ModelRunner, examples: list[Example]
) -> None:
    options = msgspec.structs.replace(OPTIONS, steps=1)
    first = trainer(tmp_path, options)
    first.run()
    first.progress.best = 9.0
    first.save()
    assert trainer(tmp_path, options).progress.best == 9.0
    others = [text for text in examples if text.checksum != first.evaluated[0]]
    target = decoder(runner.model)
    shape = shape_for(target, options, MASK)
    states = TargetStates(runner, state_layer_ids(shape), others, tmp_path / "states", 1 << 30)
    other = Trainer(target, shape, others, states, tmp_path, options)
    best: list[bool] = []
    other.run(on_evaluation=lambda progress: best.append(progress.is_best))
    assert best[0] and other.progress.best < 9.0


def test_a_run_keeps_its_draft_vocabulary(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    trainer(tmp_path, OPTIONS).save()
    with pytest.raises(ValueError, match="begun with --draft-vocab-size 64"):
        trainer(tmp_path, msgspec.structs.replace(OPTIONS, draft_vocab_size=32))


def test_accept_length_is_what_decoding_step_by_step_would_see(examples: list[Example]) -> None:
    members = [3, 8, 20]

    def predict(blocks: Blocks) -> Tensor:
        """Right but for tokens that are multiples of 3."""
        truth = blocks.tokens[..., 1:]
        return torch.where(truth % 3 == 0, -2, truth)

    steps = emitted = 0
    for member in members:
        ids = examples[member].ids.tolist()
        position = int((examples[member].ends > 0).argmax())
        while position < len(ids) - 1:
            drafted = ids[position + 1 : position + 5]
            wrong = next((i for i, token in enumerate(drafted) if token % 3 == 0), len(drafted))
            advance = min(wrong + 1, len(ids) - 1 - position)
            position, steps, emitted = position + advance, steps + 1, emitted + advance
    assert accept_length(examples, members, 5, predict) == pytest.approx(emitted / steps)


def test_tokens_outside_the_draft_vocabulary_end_acceptance(
    trainer: Callable[..., Trainer], examples: list[Example], tmp_path: Path
) -> None:
    run = trainer(tmp_path, TrainingOptions(layers=1, block_size=4, draft_vocab_size=5, steps=1))
    blocks = Blocks([0], torch.tensor([[8, 12]]), torch.zeros(1, 2, 4, dtype=torch.int64))
    assert torch.isin(run.predict(blocks), run.draft_token_ids).all()
    assert len(run.draft_token_ids) == 5


def test_too_little_text_is_said(runner: ModelRunner, examples: list[Example], tmp_path: Path) -> None:
    target = decoder(runner.model)
    few = [example for example in examples if not held_out(example)][:2]
    shape = shape_for(target, OPTIONS, MASK)
    states = TargetStates(runner, state_layer_ids(shape), few, tmp_path / "states", 0)
    with pytest.raises(ValueError, match="2 examples are too few"):
        Trainer(target, shape, few, states, tmp_path, OPTIONS)


def test_the_card_and_the_plots(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    run = trainer(
        tmp_path, TrainingOptions(layers=1, block_size=4, draft_vocab_size=64, steps=20, evaluate_seconds=5)
    )
    run.run()
    write_card(
        tmp_path, run, Facts(target="Tiny", command="tandem train-drafter x", data="300 texts", version="1")
    )
    card = (tmp_path / "README.md").read_text()
    assert f"**{run.progress.accept_lengths[-1][1]:.2f}**" in card
    assert run.progress.learned >= 1.0
    assert f"trained on | {run.progress.learned:.2f} |" in card
    assert "tandem train-drafter x" in card
    write_plots(tmp_path, run.progress)
    for name in ("loss.png", "accept_length.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_plot_follows_its_points(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    plot(tmp_path / "up.png", "value", [(0.0, 1.0), (10.0, 3.0)])
    pixels = image.open(tmp_path / "up.png").convert("RGB")
    width, height = pixels.size
    blue = [(x, y) for x in range(width) for y in range(height) if pixels.getpixel((x, y)) == (31, 97, 190)]
    (left, bottom), (right, top) = min(blue), max(blue)
    assert right - left > width * 0.8
    assert bottom - top > height * 0.7
