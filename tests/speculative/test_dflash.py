"""DFlash drafts: what is proposed is what an eager drafter proposes that has seen all of the text.

So it does not matter whether a prefix came from the cache, who computed it, or what the request did before. Accept
length is asserted beside the proposals, as it is what falls silently where the drafter's context is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine.request import OutputEvent, Request, SpeculationParams
from speculative.adaptive import FIRST_NAP, NOBODY, PATIENCE, Choice, Prospect
from speculative.alarm import WINDOW
from speculative.features import MAX_KEPT
from speculative.proposal import MakeSamplingRow, Proposal
from tests.speculative.pair import BLOCK, Everything, Pair, Recorded, Reply, Served, serving, truth_of

LENGTH = 24  # tokens of an answer
SHORT = 3  # rows of the shorter blocks
RANDOM = random.Random(0)
PROMPTS = [[RANDOM.randrange(256) for _ in range(length)] for length in (40, 53, 66, 79)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair.make(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def truths(pair: Pair) -> list[list[int]]:
    """Plain decoding's answer to each prompt, and then to that prompt with its answer."""
    with serving(pair, caching=False) as served:
        answers = [served.ask(prompt, "none", max_tokens=2 * LENGTH).token_ids for prompt in PROMPTS]
    assert all(len(answer) == 2 * LENGTH for answer in answers)
    return answers


@pytest.fixture
def served(pair: Pair, truths: list[list[int]]) -> Iterator[Served]:
    with serving(pair) as running:
        know(running, truths)
        yield running


def know(served: Served, truths: list[list[int]]) -> None:
    """Have drafts corrected towards plain decoding's text."""
    assert isinstance(served.drafter, Recorded)
    served.drafter.truth = truth_of(PROMPTS, truths)


def hold_to_reference(pair: Pair, reply: Reply) -> None:
    assert len(reply.proposed) > 3
    for text, proposed in reply.proposed:
        expected = pair.proposals_of_reference(text)
        assert proposed == expected[: len(proposed)]


@pytest.fixture(scope="module")
def cold(pair: Pair, truths: list[list[int]]) -> list[Reply]:
    """Each prompt, and then that prompt with the first half of its answer, to a server that knows nothing yet."""
    replies = []
    for prompt, answer in zip(PROMPTS, truths, strict=True):
        for text in (prompt, prompt + answer[:LENGTH]):
            with serving(pair) as served:
                know(served, truths)
                replies.append(served.ask(text, max_tokens=LENGTH))
    return replies


def test_proposals_are_those_of_the_eager_drafter(
    pair: Pair, truths: list[list[int]], cold: list[Reply]
) -> None:
    for index, reply in enumerate(cold):
        hold_to_reference(pair, reply)
        start = index % 2 * LENGTH
        assert reply.token_ids == truths[index // 2][start : start + LENGTH]
        assert reply.accept_length > 1.3, "drafts are accepted, so that the tests that compare it can fail"


def test_a_hit_drafts_as_a_cold_run_does(served: Served, truths: list[list[int]], cold: list[Reply]) -> None:
    for index, (prompt, answer) in enumerate(zip(PROMPTS, truths, strict=True)):
        served.ask(prompt, max_tokens=LENGTH - 3)
        hit = served.ask(prompt + answer[:LENGTH], max_tokens=LENGTH)
        assert hit.cached_tokens == len(prompt) + LENGTH - 4
        assert hit.proposed == cold[2 * index + 1].proposed
        assert hit.accept_length == cold[2 * index + 1].accept_length


def test_a_hit_on_what_an_opted_out_request_computed_does_so_too(
    pair: Pair, served: Served, truths: list[list[int]], cold: list[Reply]
) -> None:
    for index, (prompt, answer) in enumerate(zip(PROMPTS, truths, strict=True)):
        opted_out = served.ask(prompt, "none", max_tokens=LENGTH - 3)
        assert opted_out.stats.drafted_tokens == 0 and not opted_out.proposed
        hit = served.ask(prompt + answer[:LENGTH], max_tokens=LENGTH)
        assert hit.proposed == cold[2 * index + 1].proposed
        assert hit.accept_length == cold[2 * index + 1].accept_length
        assert hit.cached_tokens == 0, "the target computed it again, into the same slots"
        again = served.ask(prompt + answer[:LENGTH], max_tokens=LENGTH)
        assert again.cached_tokens == len(prompt) + LENGTH - 1, "and now it serves both"
        hold_to_reference(pair, again)


def test_a_prefix_that_is_computed_again_stays_what_it_was_for_others(
    served: Served, truths: list[list[int]]
) -> None:
    """An opted-out request decodes from a prefix while another refills it."""
    prompt, answer = PROMPTS[3], truths[3]
    served.ask(prompt, "none", max_tokens=2)
    first, second = served.ask_together(
        served.start(prompt, "none", max_tokens=LENGTH), served.start(prompt, max_tokens=LENGTH)
    )
    assert first.token_ids == second.token_ids == answer[:LENGTH]
    assert (first.cached_tokens, second.cached_tokens) == (len(prompt) - 1, 0)


def test_with_a_successor_head_each_token_goes_by_the_one_before_it(
    tmp_path_factory: pytest.TempPathFactory, truths: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("successor")
    pair = Pair.make(folder, successor=True)
    with serving(pair) as served:
        know(served, truths)
        replies = served.ask_together(
            *(
                served.start(prompt, max_tokens=length)
                for prompt, length in zip(PROMPTS, (12, 16, 20, 24), strict=True)
            )
        )
    for reply, answer in zip(replies, truths, strict=True):
        assert reply.token_ids == answer[: len(reply.token_ids)]
        hold_to_reference(pair, reply)
    assert max(len(proposed) for reply in replies for _, proposed in reply.proposed) > 2

    weights = load_file(pair.draft_folder / "model.safetensors")
    without = {name: tensor for name, tensor in weights.items() if not name.startswith("successor")}
    save_file(without, pair.draft_folder / "model.safetensors")
    others = [pair.proposals_of_reference(text) for text, _ in replies[0].proposed]
    assert any(
        proposed != other[: len(proposed)]
        for (_, proposed), other in zip(replies[0].proposed, others, strict=True)
    ), "the head matters"


class NotBefore(Everything):
    """Holds drafting not to pay until some steps have gone by."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def choose(self, prospects: Sequence[Prospect], rows: int, pass_rows: int = 1) -> Choice:
        self.steps -= 1
        return super().choose(prospects, rows, pass_rows) if self.steps < 0 else NOBODY


def test_drafting_that_begins_late_knows_all_that_came_before(
    pair: Pair, truths: list[list[int]], cold: list[Reply]
) -> None:
    late = 10
    with serving(pair, controller=NotBefore(late)) as served:
        know(served, truths)
        reply = served.ask(PROMPTS[0], max_tokens=LENGTH)
    assert len(reply.proposed[0][0]) == len(PROMPTS[0]) + late + 1
    hold_to_reference(pair, reply)
    assert reply.token_ids == truths[0][:LENGTH]
    # From the same text on, the same drafts as if it had drafted all along.
    known = {tuple(text): proposed for text, proposed in cold[0].proposed}
    common = [(text, proposed) for text, proposed in reply.proposed if tuple(text) in known]
    assert common and all(proposed == known[tuple(text)] for text, proposed in common)


class Never(Everything):
    """Holds drafting never to pay, and verifies nothing."""

    def choose(self, prospects: Sequence[Prospect], rows: int, pass_rows: int = 1) -> Choice:
        return NOBODY

    def plan(self, drafts: Sequence[Sequence[float]], rows: int, drafting: int = 0) -> list[int]:
        return [0] * len(drafts)


class Reading(Recorded):
    """Notes of how many tokens it was told, by request."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair)
        self.read: dict[str, int] = {}

    def committed(self, request: Request, num_tokens: int) -> None:
        super().committed(request, num_tokens)
        self.read[request.request_id] = self.read.get(request.request_id, 0) + num_tokens


def test_a_text_whose_drafts_do_not_pay_is_read_again_after_a_nap(pair: Pair) -> None:
    drafter, prompt = Reading(pair), PROMPTS[0]
    with serving(pair, controller=Never(), drafter=drafter) as served:
        served.ask(prompt, max_tokens=PATIENCE + FIRST_NAP + 20)
    (read,) = drafter.read.values()
    assert len(prompt) + PATIENCE + 10 < read < len(prompt) + PATIENCE + 30


def test_what_comes_during_a_nap_is_not_read(pair: Pair) -> None:
    drafter = Reading(pair)
    with serving(pair, controller=Never(), drafter=drafter) as served:
        served.ask(PROMPTS[0], max_tokens=PATIENCE + 10)
        served.ask(PROMPTS[1], max_tokens=LENGTH)
    assert len(drafter.read) == 1


def test_a_request_that_opts_in_midway_drafts_from_what_is_known_of_it(
    pair: Pair, served: Served, truths: list[list[int]]
) -> None:
    """It was not followed before, so the drafter has nothing of that part, and reads no slot in its place."""
    request, receiver = served.start(PROMPTS[0], "none", max_tokens=LENGTH)
    opted_in: list[int] = []

    def opt_in(event: OutputEvent) -> None:
        receiver(event)
        if len(request.output_ids) == 8:
            request.speculation = SpeculationParams()
            opted_in.append(request.cached_len)

    request.sink = opt_in
    served.engine.submit(request)
    reply = served.finish(request, receiver)
    (first,) = opted_in
    for text, proposed in reply.proposed:
        known = range(first, len(text) - 1)
        assert proposed == pair.proposals_of_reference(text, known)[: len(proposed)]
    assert reply.token_ids == truths[0][:LENGTH]
    # Who comes next does not inherit the gap.
    follow = served.ask(PROMPTS[0] + truths[0][:LENGTH], max_tokens=LENGTH)
    hold_to_reference(pair, follow)


@pytest.mark.parametrize("chunk", [16, 48, 256])
def test_requests_that_run_together_draft_as_each_alone(
    pair: Pair, truths: list[list[int]], cold: list[Reply], chunk: int
) -> None:
    """In chunks beside each other's blocks."""
    with serving(pair, chunk=chunk) as served:
        know(served, truths)
        replies = served.ask_together(*(served.start(prompt, max_tokens=LENGTH) for prompt in PROMPTS))
    for index, reply in enumerate(replies):
        assert reply.token_ids == truths[index][:LENGTH]
        assert reply.proposed == cold[2 * index].proposed
        assert reply.accept_length == cold[2 * index].accept_length


@pytest.mark.parametrize("algorithms", [(None, None), ("none", None), (None, "none")])
def test_choices_of_one_prompt_share_slots_and_context(
    pair: Pair, truths: list[list[int]], cold: list[Reply], algorithms: tuple[str | None, ...]
) -> None:
    """All compute the prompt, as they want its log-probabilities: whoever completes it first gives the others its
    slots."""
    with serving(pair, chunk=24) as served:
        know(served, truths)
        asked = [
            served.start(PROMPTS[1], algorithm, choice, max_tokens=LENGTH, prompt_logprobs=0)
            for choice, algorithm in enumerate(algorithms)
        ]
        for algorithm, reply in zip(algorithms, served.ask_together(*asked), strict=True):
            assert reply.token_ids == truths[1][:LENGTH]
            if algorithm is None:
                assert reply.proposed == cold[2].proposed


def test_context_that_was_written_for_a_prompt_moves_with_it(pair: Pair) -> None:
    """A long prompt's context is written before the prompt is complete, into slots that then turn out to be
    duplicates of an opted-out request's, which have none."""
    prompt = [RANDOM.randrange(256) for _ in range(2 * MAX_KEPT)]
    with serving(pair, chunk=MAX_KEPT // 2 + 40) as served:
        opted_out, follower = served.ask_together(
            served.start(prompt, "none", max_tokens=LENGTH),
            served.start(prompt, max_tokens=LENGTH, prompt_logprobs=0),
        )
    assert opted_out.token_ids == follower.token_ids and follower.cached_tokens == 0
    hold_to_reference(pair, follower)


def test_a_prompt_is_shared_with_its_context_while_its_first_owner_decodes(
    pair: Pair, served: Served
) -> None:
    """The second request is admitted in the step after the first one's prompt."""
    first, receiver = served.start(PROMPTS[0], max_tokens=LENGTH)
    second, other = served.start(PROMPTS[0], max_tokens=LENGTH)

    def submit_second(event: OutputEvent) -> None:
        if not receiver.events:
            served.engine.submit(second)
        receiver(event)

    first.sink = submit_second
    served.engine.submit(first)
    replies = served.finish(first, receiver), served.finish(second, other)
    assert replies[1].cached_tokens == len(PROMPTS[0]) - 1
    for reply in replies:
        hold_to_reference(pair, reply)


def test_preempted_requests_draft_on_as_if_nothing_had_been(
    pair: Pair, truths: list[list[int]], cold: list[Reply]
) -> None:
    with serving(pair, slots=190) as served:
        know(served, truths)
        replies = served.ask_together(*(served.start(prompt, max_tokens=LENGTH) for prompt in PROMPTS))
        assert served.engine.stats().preemptions_total > 0
    known = {tuple(text): proposed for reply in cold for text, proposed in reply.proposed}
    for index, reply in enumerate(replies):
        assert reply.token_ids == truths[index][:LENGTH]
        for text, proposed in reply.proposed:
            # A dry pool shortens blocks, so that texts may come up that the cold run did not stop at.
            if tuple(text) in known:
                assert proposed == known[tuple(text)]


def test_an_abort_leaves_a_context_that_others_can_use(pair: Pair, served: Served) -> None:
    request, receiver = served.start(PROMPTS[2], max_tokens=200)
    served.engine.submit(request)
    assert receiver.first.wait(60)
    served.engine.abort(request.request_id)
    receiver.wait()
    hit = served.ask(PROMPTS[2], max_tokens=LENGTH)
    assert hit.cached_tokens == len(PROMPTS[2]) - 1
    hold_to_reference(pair, hit)


def test_a_window_leaves_the_last_tokens(pair: Pair, truths: list[list[int]]) -> None:
    window = 20
    with serving(pair, window=window) as served:
        know(served, truths)
        first = served.ask(PROMPTS[0], max_tokens=LENGTH)
        hit = served.ask(PROMPTS[0] + truths[0][:LENGTH], max_tokens=LENGTH)
    for reply in (first, hit):
        for text, proposed in reply.proposed:
            known = range(max(0, len(text) - 1 - window), len(text) - 1)
            assert proposed == pair.proposals_of_reference(text, known)[: len(proposed)]


class Promising(Recorded):
    promised_accept_length = 5.0


def test_a_drafter_that_falls_short_of_its_card_raises_the_alarm(pair: Pair) -> None:
    """Nothing corrects this random drafter, so no draft is right; requests that sample do not count."""
    with serving(pair, drafter=Promising(pair)) as served:
        assert served.engine.stats().worker == {
            "drafter_accept_length_promised": 5.0,
            "drafter_accept_length_alarm": 0,
        }
        asked = [served.start(PROMPTS[0], max_tokens=WINDOW // 8 + 4) for _ in range(8)]
        asked += [served.start(PROMPTS[1], max_tokens=32, temperature=1.0, seed=1)]
        served.ask_together(*asked)
        served.ask(PROMPTS[2], max_tokens=2)
        gauges = served.engine.stats().worker
    assert gauges["drafter_accept_length_alarm"] == 1
    assert 1.0 <= gauges["drafter_accept_length"] < 1.5


def test_a_shorter_block_may_be_asked_for(served: Served, truths: list[list[int]]) -> None:
    request, receiver = served.start(PROMPTS[0], max_tokens=LENGTH)
    request.speculation = SpeculationParams(num_draft_tokens=3)
    (reply,) = served.ask_together((request, receiver))
    assert reply.token_ids == truths[0][:LENGTH]
    assert 0 < reply.stats.drafted_tokens <= 2 * reply.stats.verify_steps


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair whose drafter was trained for blocks of half the size as well."""
    return Pair.make(tmp_path_factory.mktemp("short"), short_block_size=SHORT)


class AtMost(Everything):
    """Has only the first so many tokens of a draft verified."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def plan(self, drafts: Sequence[Sequence[float]], rows: int, drafting: int = 0) -> list[int]:
        return [min(length, self.tokens) for length in super().plan(drafts, rows, drafting)]


class Hopeful(Recorded):
    """Notes how much it is asked for, and gives all of it, whatever its own hope."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair)
        self.asked: list[int] = []

    def propose(
        self, requests: Sequence[Request], limits: Sequence[int], sampling_row: MakeSamplingRow
    ) -> list[Proposal]:
        self.asked += limits
        (proposal,) = super().propose(requests, limits, sampling_row)
        missing = (0,) * (limits[0] - len(proposal.token_ids))
        return [Proposal(proposal.token_ids + missing, proposal.levels + missing)]


@pytest.mark.parametrize(("verified", "long"), [(SHORT - 2, False), (BLOCK, True)])
def test_long_blocks_are_drafted_where_short_ones_are_used_up(short: Pair, verified: int, long: bool) -> None:
    drafter = Hopeful(short)
    with serving(short, controller=AtMost(verified), drafter=drafter) as served:
        reply = served.ask(PROMPTS[0], max_tokens=LENGTH)
    sizes = [SHORT, *[BLOCK if long else SHORT] * 4]
    assert drafter.asked[:5] == [size - 1 for size in sizes]
    differ = False
    for (text, proposed), size in zip(reply.proposed[:5], sizes, strict=True):
        assert proposed == short.proposals_of_reference(text, block_size=size)[: len(proposed)]
        other = short.proposals_of_reference(text, block_size=SHORT + BLOCK - size)
        differ = differ or proposed != other[: len(proposed)]
    assert differ or not long, "the sizes of blocks can be told apart"


@pytest.mark.parametrize("context", [1, 2, BLOCK, BLOCK + 1])
def test_a_context_may_be_shorter_than_a_block(tmp_path: Path, context: int) -> None:
    short = Pair.make(tmp_path, context, context)
    with serving(short) as served:
        served.worker.warm_up()
        reply = served.ask([1] * (context - 1) or [1], max_tokens=min(1, context - 1))
    assert reply.finish_reason == "length"


# The target needs room for a draft and the token after it, the drafter for its whole block.
@pytest.mark.parametrize(("context", "draft_context", "end"), [(96, 512, 94), (512, 96, 96 - BLOCK + 1)])
def test_drafting_ends_at_the_context_limit_of_either_model(
    tmp_path: Path, context: int, draft_context: int, end: int
) -> None:
    short = Pair.make(tmp_path, context, draft_context)
    with serving(short) as served:
        plain = served.ask(PROMPTS[1], "none", max_tokens=70)
        reply = served.ask(PROMPTS[1], max_tokens=70)
    assert reply.token_ids == plain.token_ids
    assert reply.finish_reason == "length"
    assert max(len(text) for text, _ in reply.proposed) == end
