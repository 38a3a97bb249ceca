"""The worker that drafts: by looking up what the text said before, or other answers did, by a drafting model, or not
at all, whichever is measured to pay for each request in each step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.plain_worker import Rows
from engine.request import Request
from engine.runner import ModelRunner
from engine.worker import SequenceStep, StepOutput
from speculative.adaptive import (
    NOBODY,
    TIMES_NEEDED,
    AcceptRates,
    Choice,
    DraftWorth,
    PayoffController,
    Prospect,
    Watch,
)
from speculative.alarm import AcceptAlarm
from speculative.drafter import Drafter
from speculative.history import HISTORY_GUESSES, LONGEST_CONTEXT, NgramHistory
from speculative.ngram import NgramIndex
from speculative.options import SpeculativeOptions
from speculative.proposal import LEVEL_GUESSES, Proposal
from speculative.worker import SpeculativeWorker

_NOTHING = Proposal()
# Tokens of new texts that are looked through in a step: long prompts that arrive together hold nobody up.
INDEXED_A_STEP = 16_384
_FEW = 64  # tokens, as a step adds to a text
LEARNED_A_STEP = 256  # tokens of answers that have ended, likewise, with those before them
ANSWERS_KEPT = 256  # that are still to be learned: where more end, the oldest are left out
# What a draft is taken to be worth while there has not been one: enough to try.
_FIRST_DRAFT = tuple(0.7**j for j in range(1, 8))


@dataclass(slots=True)
class _Source:
    """Drafts of one kind for one request: their accept rates, the last draft, and the chances of its tokens."""

    rates: AcceptRates
    proposal: Proposal = _NOTHING
    chances: Sequence[float] = ()

    def offer(self, proposal: Proposal) -> None:
        self.proposal = proposal
        self.chances = self.rates.chances(proposal.levels) if proposal.levels else ()


@dataclass(slots=True)
class _Drafting:
    """What is kept for a request. `worth` is that of the model's drafts for it; `pays`: one was made in this step that
    is expected to pay; `long`: the last one of them was worth verifying to its end, or beyond what a short one has."""

    lookup: _Source
    history: _Source
    model: _Source
    worth: DraftWorth
    watch: Watch
    pays: bool = False
    index: NgramIndex | None = None
    long: bool = False


class DraftingWorker(SpeculativeWorker):
    """Drafts of prompt lookup, of earlier answers and of a drafting model, verified by the target, under pay-off
    control."""

    def __init__(
        self,
        runner: ModelRunner,
        eos_token_ids: frozenset[int],
        options: SpeculativeOptions,
        controller: PayoffController,
        history: NgramHistory,
        drafter: Drafter | None = None,
    ) -> None:
        super().__init__(runner, eos_token_ids)
        self._options = options
        self._answers = history
        self._controller = controller
        self._drafter = drafter
        promised = None if drafter is None else drafter.promised_accept_length
        self._alarm = None if promised is None else AcceptAlarm(promised)
        self._lookup_rates = AcceptRates()
        self._history_rates = AcceptRates(guesses=HISTORY_GUESSES)
        self._model_rates = AcceptRates(guesses=LEVEL_GUESSES)
        self._worth = DraftWorth(chances=_FIRST_DRAFT)  # of all requests
        self._watch = Watch()  # likewise
        self._drafting: dict[Request, _Drafting] = {}
        self._prompt_slots: dict[Request, list[int]] = {}  # of prompts that this step completes
        self._to_index = 0  # tokens, in this step
        # Of answers that have ended: the tokens with those before them, and from where on they are to be learned.
        self._to_learn: deque[tuple[list[int], int]] = deque(maxlen=ANSWERS_KEPT)

    def warm_up(self) -> None:
        """Time passes of one row, of blocks, and drafts, so that the first requests need not try out what they cost."""
        super().warm_up()
        if self._drafter is not None:
            self._drafter.prepare()
            self._drafter.time_draft(self._drafter.num_draft_tokens - 1)
        most = min(self._options.num_draft_tokens, self.runner.max_context_len)
        sizes = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
        for rows in sizes * TIMES_NEEDED:
            self._controller.observe_step(rows, self.runner.time_pass(rows))
        if self._drafter is None:
            return
        for limit in sorted({self._drafter.short_draft, self._drafter.num_draft_tokens - 1}) * TIMES_NEEDED:
            seconds = self._drafter.time_draft(limit)
            if seconds is not None:
                self._controller.observe_drafting(self._drafter.pass_rows([limit]), seconds)

    def max_draft_tokens(self, request: Request) -> int:
        limit = self._options.num_draft_tokens
        allowed = min(request.speculation.num_draft_tokens or limit, limit) - 1
        most = allowed if self._looks_up(request) else 0
        if self._drafter is not None and self._follows(request):
            most = max(most, min(self._drafter.room(request), allowed))
        return most

    def draft(self, requests: Sequence[Request], limits: Sequence[int], rows: int) -> list[tuple[int, ...]]:
        states = [self._state(request) for request in requests]
        self._to_index = INDEXED_A_STEP
        for request, state, limit in zip(requests, states, limits, strict=True):
            state.model.offer(_NOTHING)
            state.lookup.offer(self._look_up(request, state, limit))
            state.history.offer(self._recall(request, limit))
        from_text = [_likeliest(state.lookup, state.history) for state in states]
        drafting = self._run_model(requests, states, from_text, limits, rows)
        chosen = [_likeliest(text, state.model) for state, text in zip(states, from_text, strict=True)]
        lengths = self._controller.plan([source.chances for source in chosen], rows, drafting)
        if drafting:
            self._note_lengths(states, chosen, lengths)
        return [source.proposal.token_ids[:length] for source, length in zip(chosen, lengths, strict=True)]

    def forward(self, steps: Sequence[SequenceStep]) -> list[StepOutput]:
        start = time.perf_counter()
        outputs = super().forward(steps)
        rows = sum(step.num_tokens + len(step.drafts) for step in steps)
        self._controller.observe_step(rows, time.perf_counter() - start)
        self.learn_answers()
        return outputs

    def learn_answers(self) -> None:
        """A step's share of the answers that have ended."""
        left = LEARNED_A_STEP
        while left > 0 and self._to_learn:
            tokens, start = self._to_learn[0]
            stop = min(len(tokens), start + left)
            before = max(0, start - LONGEST_CONTEXT)
            self._answers.learn(tokens[before:stop], start - before)
            left -= stop - before
            if stop < len(tokens):
                self._to_learn[0] = tokens, stop
            else:
                self._to_learn.popleft()

    def run_pass(self, steps: Sequence[SequenceStep]) -> Rows:
        drafter = self._drafter
        if drafter is None:
            return super().run_pass(steps)
        following = [step for step in steps if self._follows(step.request) and drafter.room(step.request)]
        batch = self.runner.batch(steps, drafter.capture_layers if following else ())
        rows, captured = self.run_batch(steps, batch)
        drafter.target_wrote(steps, captured)
        for step in following:
            if step.samples and step.num_tokens > 1:
                self._prompt_slots[step.request] = list(step.request.slots)
        return rows

    def observe(self, request: Request, step: SequenceStep, emitted: int) -> None:
        if self._drafter is not None and self._follows(request):
            self._drafter.committed(request, step.num_tokens + max(0, emitted - 1))
            before = self._prompt_slots.pop(request, None)
            if before is not None and before[: request.tree_len] != request.slots[: request.tree_len]:
                self._drafter.moved(request, before[: request.tree_len])
        state = self._drafting.get(request)
        if state is None or not emitted:
            return
        self._learn(state.lookup, request, emitted)
        self._learn(state.history, request, emitted)
        tried, agreed = self._learn(state.model, request, emitted)
        if self._alarm is not None and tried and request.sampling.temperature == 0:
            self._alarm.observe(tried, agreed)
        if self._uses_model(request):
            state.watch.step(state.pays)
            self._watch.step(state.pays)
            state.pays = False

    def usable_prefix(self, request: Request, slots: Sequence[int]) -> int:
        usable = super().usable_prefix(request, slots)
        if self._drafter is None or not self._uses_model(request):
            return usable
        if not self._watch.pays or not self._drafter.room(request):
            return usable  # a draft can do without some of the context, and there may never be one
        return min(usable, self._drafter.usable_prefix(request, slots))

    def before_release(self, request: Request) -> None:
        self._prompt_slots.pop(request, None)
        if self._drafter is not None:
            self._drafter.forget(request)

    def gauges(self) -> Mapping[str, float]:
        return {} if self._alarm is None else self._alarm.gauges()

    def release(self, request: Request) -> None:
        super().release(request)
        self._drafting.pop(request, None)
        if self._looks_up(request) and request.output_ids:
            start = len(request.prompt_ids)
            before = max(0, start - LONGEST_CONTEXT)
            self._to_learn.append((request.token_ids(before, request.num_tokens), start - before))

    def _algorithm(self, request: Request) -> str:
        return request.speculation.algorithm or self._options.algorithm

    def _looks_up(self, request: Request) -> bool:
        return self._algorithm(request) in ("ngram", "auto")

    def _uses_model(self, request: Request) -> bool:
        return self._drafter is not None and self._algorithm(request) in (self._drafter.name, "auto")

    def _follows(self, request: Request) -> bool:
        """Whether the model reads what the target computes for the request, and may draft for it."""
        return self._uses_model(request) and self._state(request).watch.is_awake

    def _state(self, request: Request) -> _Drafting:
        state = self._drafting.get(request)
        if state is None:
            state = self._drafting[request] = _Drafting(
                _Source(AcceptRates(self._lookup_rates)),
                _Source(AcceptRates(self._history_rates)),
                _Source(AcceptRates(self._model_rates)),
                DraftWorth(self._worth),
                Watch(self._watch),
            )
        return state

    def _look_up(self, request: Request, state: _Drafting, limit: int) -> Proposal:
        if not self._looks_up(request):
            return _NOTHING
        index = state.index
        if index is None:
            index = state.index = NgramIndex(self._options.ngram_min_match, self._options.ngram_max_match)
        stop = request.num_tokens
        if stop - len(index) > _FEW:
            stop = min(stop, len(index) + self._to_index)
            self._to_index -= stop - len(index)
        index.extend(request.token_ids(len(index), stop))
        if stop < request.num_tokens:
            return _NOTHING
        draft = index.propose(limit)
        first = draft.match_length
        return Proposal(draft.token_ids, tuple(range(first, first + len(draft.token_ids))))

    def _recall(self, request: Request, limit: int) -> Proposal:
        if not self._looks_up(request):
            return _NOTHING
        end = request.num_tokens
        context = request.token_ids(max(0, end - LONGEST_CONTEXT), end)
        return self._answers.propose(context, limit, self._history_rates.alone())

    def _run_model(
        self,
        requests: Sequence[Request],
        states: Sequence[_Drafting],
        from_text: Sequence[_Source],
        limits: Sequence[int],
        rows: int,
    ) -> int:
        """Have the model draft for those that it pays for, beyond what they have; returns the rows of its pass."""
        drafter = self._drafter
        if drafter is None:
            return 0
        rooms = [
            min(limit, drafter.room(request), *(() if state.long else (drafter.short_draft,)))
            if self._follows(request)
            else 0
            for request, state, limit in zip(requests, states, limits, strict=True)
        ]
        chosen, pays = self._prospects_chosen(states, from_text, rooms, rows) if any(rooms) else NOBODY
        ready = drafter.make_ready([requests[i] for i in chosen]) if chosen else []
        chosen = [i for i, is_ready in zip(chosen, ready, strict=True) if is_ready]
        if not chosen:
            return 0
        start = time.perf_counter()
        within = [rooms[i] for i in chosen]
        proposals = drafter.propose([requests[i] for i in chosen], within, self.sampling_row)
        pass_rows = drafter.pass_rows(within)
        self._controller.observe_drafting(pass_rows, time.perf_counter() - start)
        for i, proposal in zip(chosen, proposals, strict=True):
            states[i].pays = pays
            source = states[i].model
            source.offer(proposal)
            states[i].worth.observe(source.chances)
            self._worth.observe(source.chances)
        return pass_rows

    def _prospects_chosen(
        self, states: Sequence[_Drafting], from_text: Sequence[_Source], rooms: Sequence[int], rows: int
    ) -> Choice:
        assert self._drafter is not None
        prospects = [
            Prospect(state.worth if room else None, text.chances)
            for state, text, room in zip(states, from_text, rooms, strict=True)
        ]
        return self._controller.choose(prospects, rows, self._drafter.pass_rows([max(rooms)]))

    def _note_lengths(
        self, states: Sequence[_Drafting], chosen: Sequence[_Source], lengths: Sequence[int]
    ) -> None:
        assert self._drafter is not None
        for state, source, length in zip(states, chosen, lengths, strict=True):
            if source is state.model:
                state.long = length >= self._drafter.short_draft

    def _learn(self, source: _Source, request: Request, emitted: int) -> tuple[int, int]:
        """Compare the last draft with what was emitted, verified or not, so that drafting resumes as soon as it would
        pay. How many of its tokens could be compared, and how many of those agreed before the first that did not."""
        proposal = source.proposal
        source.offer(_NOTHING)
        drafted = proposal.token_ids
        if not drafted:
            return 0, 0
        known = min(len(drafted), emitted)
        written = request.output_ids[-emitted:]
        agreed = 0
        while agreed < known and drafted[agreed] == written[agreed]:
            agreed += 1
        self._controller.observe(source.rates, proposal.levels[:known], agreed)
        return known, agreed


def _likeliest(first: _Source, second: _Source) -> _Source:
    """Whose draft is expected to have more tokens accepted; the first where neither has one."""
    return max(first, second, key=lambda source: sum(source.chances))
