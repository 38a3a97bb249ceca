"""The training loop: batches of blocks, decay-weighted cross-entropy, AdamW, evaluation and checkpoints.

The cross-entropy is in part against the token that the text has at a position, in part against the distribution that
the target has there, by which one text tells far more (Hinton et al., "Distilling the Knowledge in a Neural Network",
arXiv:1503.02531; for drafters, Zhou et al., "DistillSpec", arXiv:2310.08461).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from models.decoder import Decoder
from speculative.training.checkpoint import load_state, save_state
from speculative.training.data import Blocks, Example, Sampler, frequent_tokens, held_out
from speculative.training.evaluation import accept_length
from speculative.training.model import DrafterShape
from speculative.training.ops import head_loss, mean_rows
from speculative.training.options import TrainingOptions
from speculative.training.start import dense, empty_drafter, initial_drafter, spread
from speculative.training.states import TargetStates

_EVALUATED = 48  # examples, of all files alike
_LEARNED = 16  # likewise, of those that are trained on
_WHOLE_EVERY = 4  # steps, one of which takes whole blocks
_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.01
_CLIP = 1.0
_LAST_RATE = 0.05  # of the learning rate, at the end of the cosine
_LOSS_EVERY = 10  # steps
_LOSS_MEMORY = 0.98  # a step
_ROWS_PREDICTED = 1024  # at a time


class Progress(msgspec.Struct):
    """Where a run is. `losses` and `accept_lengths` are pairs of minutes and value; `best` is the highest length,
    `learned` the last one of texts that the drafter is trained on."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    anchors: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    best: float = 0.0
    learned: float = 0.0
    losses: list[tuple[float, float]] = msgspec.field(default_factory=list)
    accept_lengths: list[tuple[float, float]] = msgspec.field(default_factory=list)

    @property
    def is_best(self) -> bool:
        """Whether no earlier evaluation had a higher accept length than the last one."""
        return self.accept_lengths[-1][1] == self.best


class Trainer:
    """One run: resumed where the folder has a state, begun anew where it has none."""

    def __init__(
        self,
        target: Decoder,
        shape: DrafterShape,
        examples: Sequence[Example],
        states: TargetStates,
        folder: Path,
        options: TrainingOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shape, self.options = shape, options
        self.states = states
        self._target, self._examples = target, examples
        self._folder, self._clock = folder, clock
        self._evaluated = spread([i for i, example in enumerate(examples) if held_out(example)], _EVALUATED)
        training = [i for i, example in enumerate(examples) if not held_out(example)]
        if not self._evaluated or not training:
            raise ValueError(
                f"{len(examples)} examples are too few: one in 50 is held out, and there are none to "
                f"{'train' if self._evaluated else 'evaluate'} on. Raise --tokens, or name more --data"
            )
        self._learned = spread(training, _LEARNED)
        group = max(1, options.anchors_per_step // options.anchors_per_example)
        self._sampler = Sampler(examples, training, group, options.seed)
        self._features_width = len(shape.target_layer_ids) * shape.hidden_size
        self.device = target.norm.weight.device
        fast = self.device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()
        self.dtype = torch.bfloat16 if fast else torch.float32
        state = load_state(folder)
        if state is None:
            self.progress = Progress()
            self.draft_token_ids = frequent_tokens(
                (examples[i] for i in training), shape.vocab_size, options.draft_vocab_size
            )
            sample = states.padded(spread(training, 16)).flatten(0, 1)
            features = sample[sample.any(1), : self._features_width]
            self.drafter = initial_drafter(target, shape, features, options.seed)
        else:
            if state["shape"] != msgspec.to_builtins(shape):
                was, now = state["shape"], msgspec.to_builtins(shape)
                changed = ", ".join(f"{key} was {was.get(key)}" for key in now if was.get(key) != now[key])
                raise ValueError(f"{folder}: begun with another shape of drafter: {changed}")
            self.progress = msgspec.convert(state["progress"], Progress)
            self.draft_token_ids = state["draft_token_ids"]
            if len(self.draft_token_ids) != min(options.draft_vocab_size, shape.vocab_size):
                raise ValueError(
                    f"{folder}: begun with --draft-vocab-size {len(self.draft_token_ids)}, which cannot change"
                )
            self.drafter = empty_drafter(target, shape)
            self.drafter.load_state_dict(state["drafter"])
        self._optimizer = torch.optim.AdamW(
            self.drafter.parameters(), betas=_BETAS, weight_decay=_WEIGHT_DECAY, fused=True
        )
        if state is not None:
            self._optimizer.load_state_dict(state["optimizer"])
        # Lengths of other texts are no measure for those of these.
        self._must_evaluate = state is None or state.get("evaluated") != self.evaluated
        if self._must_evaluate:
            self.progress.best = 0.0
        self._column_of = torch.full((shape.vocab_size,), -1, device=self.device)
        self._column_of[self.draft_token_ids] = torch.arange(len(self.draft_token_ids), device=self.device)
        self._head = dense(target.lm_head)[self.draft_token_ids.to(self.device)].to(self.dtype)
        self._mask_embedding = self._embed(torch.tensor([shape.mask_token_id]))

    @property
    def share_done(self) -> float:
        """Of the budget, 0 to 1."""
        steps, progress = self.options.steps, self.progress
        if steps is not None:
            return min(progress.step / max(steps, 1), 1.0)
        return min(progress.seconds / max(60 * self.options.minutes, 1e-9), 1.0)

    def run(
        self,
        on_step: Callable[[Progress], None] = lambda progress: None,
        on_evaluation: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        """Train until the budget is spent."""
        progress, options = self.progress, self.options
        saved = evaluated = progress.seconds
        if self._must_evaluate:
            self._evaluate(on_evaluation)
        while self.share_done < 1.0:
            self._timed_step()
            on_step(progress)
            if progress.seconds - evaluated >= options.evaluate_seconds:
                evaluated = progress.seconds
                self._evaluate(on_evaluation)
            if progress.seconds - saved >= options.checkpoint_seconds:
                saved = progress.seconds
                self.save()
        if evaluated < progress.seconds:
            self._evaluate(on_evaluation)
        self.save()

    def save(self) -> None:
        """Keep all that a resumed run needs."""
        state: dict[str, Any] = {
            "shape": msgspec.to_builtins(self.shape),
            "drafter": self.drafter.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "draft_token_ids": self.draft_token_ids,
            "progress": msgspec.to_builtins(self.progress),
            "evaluated": self.evaluated,
        }
        save_state(self._folder, state)

    @torch.no_grad()
    def predict(self, blocks: Blocks) -> Tensor:
        """The tokens drafted for offsets 1 and up, int64 [G, A, B - 1]."""
        states = self.states.padded(blocks.members).to(self.device)
        hidden = self._hidden(blocks, states)
        best = [(rows @ self._head.t()).argmax(-1) for rows in hidden.flatten(0, 2).split(_ROWS_PREDICTED)]
        return self.draft_token_ids[torch.cat(best).cpu()].view(hidden.shape[:3])

    @torch.no_grad()
    def wanted(self, blocks: Blocks, states: Tensor, known: Tensor) -> Tensor:
        """The mean row of the head, [N, H], that the drafter is to foresee where blocks have `known` tokens.

        states [G, L, width] of the blocks' sequences; known: bool [G, A, B - 1], N of which are true.
        """
        sequence, anchor, offset = known.nonzero(as_tuple=True)
        position = blocks.anchors.to(self.device)[sequence, anchor] + offset
        before_norm = states[..., -self.shape.hidden_size :][sequence, position]
        last = self._target.norm(before_norm.to(self._target.dtype)).to(self.dtype)
        soft = mean_rows(last, self._head, self._target.finish_logits)
        columns = self._column_of[blocks.tokens[:, :, 1:].to(self.device)[known]]
        # Of a token that cannot be drafted, what could be in its place is all that there is to learn.
        share = torch.where(columns >= 0, self.options.soft_share, 1.0).to(self.dtype)
        return torch.lerp(self._head[columns], soft, share[:, None])

    @property
    def evaluated(self) -> list[int]:
        """Checksums of the texts that accept lengths are of."""
        return [self._examples[member].checksum for member in self._evaluated]

    def _evaluate(self, on_evaluation: Callable[[Progress], None]) -> None:
        progress = self.progress
        length, progress.learned = (
            accept_length(self._examples, members, self.shape.block_size, self.predict)
            for members in (self._evaluated, self._learned)
        )
        progress.accept_lengths.append((progress.seconds / 60, length))
        progress.best = max(progress.best, length)
        on_evaluation(progress)

    def _timed_step(self) -> None:
        progress = self.progress
        start = self._clock()
        loss = self._step()
        progress.seconds += self._clock() - start
        progress.loss = (
            loss if not progress.step else _LOSS_MEMORY * progress.loss + (1 - _LOSS_MEMORY) * loss
        )
        progress.step += 1
        progress.batch += 1
        if progress.batch >= self._sampler.batches:
            progress.epoch, progress.batch = progress.epoch + 1, 0
        if progress.step % _LOSS_EVERY == 0:
            progress.losses.append((progress.seconds / 60, progress.loss))

    def _step(self) -> float:
        """One step of the optimiser; returns the mean loss."""
        options, progress = self.options, self.progress
        for group in self._optimizer.param_groups:
            group["lr"] = options.learning_rate * self._schedule()
        # Most steps take twice as many blocks of half the size: what is drafted first is accepted most often, and a
        # drafter that knows shorter blocks can be asked for one.
        parts = 2 if progress.step % _WHOLE_EVERY and self.shape.short_block_size is not None else 1
        blocks = self._sampler.batch(
            progress.epoch,
            progress.batch,
            self.shape.block_size // parts,
            options.anchors_per_example * parts,
        )
        progress.anchors += blocks.anchors.numel()
        states = self.states.padded(blocks.members).to(self.device)
        known = (blocks.tokens[:, :, 1:] >= 0).to(self.device)
        weights = torch.exp(-torch.arange(known.shape[-1], device=self.device) / options.decay)
        weights = weights.expand(known.shape)[known]
        hidden = self._hidden(blocks, states)[known]
        loss = head_loss(hidden, self._head, self.wanted(blocks, states, known), weights / weights.sum())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), _CLIP, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    def _hidden(self, blocks: Blocks, states: Tensor) -> Tensor:
        """Final hidden states of the masked positions, [G, A, B - 1, H], as if every draft before each were right.

        Where one is not, verification ends, and what is drafted behind it does not matter.
        """
        features = states[..., : self._features_width].to(self.dtype)
        before = self._embed(blocks.tokens[:, :, :-1].clamp(min=0))
        embeddings = self._mask_embedding.expand(*blocks.tokens.shape, -1).clone()
        embeddings[:, :, 0] = before[:, :, 0]
        return self.drafter(features, embeddings, before, blocks.anchors.to(self.device))

    def _embed(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            rows = self._target.embed_tokens(ids.flatten().to(self.device))
        return rows.view(*ids.shape, -1).to(self.dtype)

    def _schedule(self) -> float:
        """Warm-up, then half a cosine."""
        warm = min(1.0, (self.progress.step + 1) / self.options.warmup_steps)
        return warm * (_LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * self.share_done)))
