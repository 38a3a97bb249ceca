"""What a run leaves to look at: plots of loss and accept length, and the checkpoint's model card."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from speculative.training.checkpoint import write_atomically
from speculative.training.trainer import Progress, Trainer

logger = logging.getLogger(__name__)

_SIZE, _LEFT, _RIGHT, _TOP, _BOTTOM = (800, 450), 70, 20, 40, 40
_INK, _GRID, _LINE = (40, 40, 40), (225, 225, 225), (31, 97, 190)


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a card says beside what the trainer knows."""

    target: str
    command: str
    data: str  # in words
    version: str


def write_card(folder: Path, trainer: Trainer, facts: Facts) -> None:
    """Write README.md: what the drafter is, how it was made, and what it measured."""
    shape, options, progress = trainer.shape, trainer.options, trainer.progress
    parameters = sum(parameter.numel() for parameter in trainer.drafter.parameters())
    minutes, length = progress.accept_lengths[-1]
    card = f"""# DFlash drafter for {facts.target}

A drafter for speculative decoding with Tandem {facts.version}. It works with this target only, and changes nothing in
what the target writes: it drafts, the target verifies.

| | |
|---|---|
| accept length, held-out text, greedy | **{length:.2f}** tokens a verify step, the bonus token included |
| the same, text that it was trained on | {progress.learned:.2f} |
| block size | {shape.block_size} |
| layers | {shape.num_layers}, {parameters / 1e6:.1f} M parameters in {options.weights} |
| target layers seen | {", ".join(map(str, shape.target_layer_ids))} (outputs, counted from 0) |
| draft vocabulary | {len(trainer.draft_token_ids):,} of {shape.vocab_size:,} tokens |
| mask token | {shape.mask_token_id} |
| trained | {minutes:.0f} minutes, {progress.step:,} steps, {progress.anchors:,} blocks, epoch {progress.epoch + 1} |
| loss | {progress.loss:.3f}, weights falling by e every {options.decay:g} offsets |
| data | {facts.data} |

The accept length is that of text of the target's own which training never saw, drafted from every step that serving
would take; on other text it is another.

Made, and to be continued, by:

    {facts.command}
"""
    write_atomically(folder / "README.md", card)


def write_plots(folder: Path, progress: Progress) -> None:
    """Write loss.png and accept_length.png. Without Pillow there are none."""
    try:
        plot(folder / "loss.png", "loss", progress.losses)
        plot(folder / "accept_length.png", "accept length", progress.accept_lengths)
    except ImportError:
        logger.info("no plots: install tandem[train]")


def plot(path: Path, title: str, points: Sequence[tuple[float, float]]) -> None:
    """Draw `points` (minutes, value) as a line. Raises ImportError where Pillow is not installed."""
    from PIL import Image, ImageDraw

    if len(points) < 2:
        return
    width, height = _SIZE
    image = Image.new("RGB", _SIZE, "white")
    draw = ImageDraw.Draw(image)
    (left, right), (low, high) = ((min(axis), max(axis)) for axis in zip(*points, strict=True))
    across, up = (right - left) or 1.0, (high - low) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (x - left) / across * (width - _LEFT - _RIGHT),
            height - _BOTTOM - (y - low) / up * (height - _TOP - _BOTTOM),
        )

    for tick in range(6):
        x, y = left + across * tick / 5, low + up * tick / 5
        draw.line([place(left, y), place(right, y)], fill=_GRID)
        draw.text((place(left, y)[0] - 8, place(left, y)[1]), f"{y:.2f}", fill=_INK, anchor="rm")
        draw.text((place(x, low)[0], height - _BOTTOM + 8), f"{x:.0f}", fill=_INK, anchor="mt")
    draw.line([place(x, y) for x, y in points], fill=_LINE, width=2)
    draw.text((_LEFT, _TOP // 2), title, fill=_INK, anchor="lm")
    draw.text((width - _RIGHT, height - 10), "minutes of training", fill=_INK, anchor="rm")
    image.save(path)
