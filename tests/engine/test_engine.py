"""The decode loop: requests in, tokens out, and nothing lost when they end early."""

from __future__ import annotations

import threading

import pytest

from engine.engine import Engine
from engine.errors import EngineStopped, InvalidRequest, QueueFull
from engine.request import OutputEvent, Request, SamplingParams
from tests.engine.fakes import (
    CountingWorker,
    LetterTokenizer,
    Receiver,
    letters,
    make_request,
    running_engine,
)


def slots_left(engine: Engine) -> int:
    stats = engine.stats()
    return stats.slots_free + stats.slots_evictable


def test_a_request_gets_its_tokens_and_its_usage() -> None:
    with running_engine(CountingWorker()) as engine:
        request, receiver = make_request("r", "ab", max_tokens=3)
        engine.submit(request)
        last = receiver.wait()

    assert receiver.text == "cde"
    assert (last.finish_reason, last.prompt_tokens, last.completion_tokens) == ("length", 2, 3)
    assert last.speculation is not None and last.speculation.verify_steps == 0


@pytest.mark.parametrize(("drafts", "wrong"), [(1, 0), (4, 0), (4, 2), (4, 4), (15, 7)])
def test_drafts_change_the_number_of_steps_and_nothing_else(drafts: int, wrong: int) -> None:
    with running_engine(CountingWorker(drafts, wrong)) as engine:
        request, receiver = make_request("r", "abc", max_tokens=20)
        engine.submit(request)
        last = receiver.wait()
        steps = engine.stats().steps_total

    stats = last.speculation
    assert stats is not None
    assert receiver.text == "defghijklmnopqrstuvw"
    assert stats.accepted_tokens == 20 - steps
    assert stats.verify_emitted_tokens == stats.accepted_tokens + stats.verify_steps


@pytest.mark.parametrize("drafts", [0, 3, 8])
def test_a_stop_inside_an_accepted_block_cuts_text_tokens_usage_and_counters_at_one_place(
    drafts: int,
) -> None:
    with running_engine(CountingWorker(drafts)) as engine:
        request, receiver = make_request("r", "ab", max_tokens=50, stop=("gh",))
        engine.submit(request)
        last = receiver.wait()
        total = engine.stats()

    assert receiver.text == "cdef"
    assert receiver.token_ids == letters("cdefgh")
    assert (last.finish_reason, last.stop_reason, last.completion_tokens) == ("stop", "gh", 6)
    assert last.speculation is not None
    assert last.speculation.accepted_tokens <= 5 and total.generation_tokens_total == 6


def test_logprobs_are_of_the_tokens_in_the_text() -> None:
    with running_engine(CountingWorker()) as engine:
        request, receiver = make_request(
            "r", "ab", max_tokens=50, logprobs=0, stop_token_ids=tuple(letters("f"))
        )
        engine.submit(request)
        assert receiver.wait().finish_reason == "stop"

    assert receiver.text == "cde"
    assert receiver.token_ids == letters("cdef")
    shown = [entry.token_id for event in receiver.events for entry in event.logprobs]
    assert shown == letters("cde")


def test_the_block_shrinks_at_the_context_limit() -> None:
    with running_engine(CountingWorker(8), context=12) as engine:
        request, receiver = make_request("r", "abcd", max_tokens=100)
        engine.submit(request)
        last = receiver.wait()

    assert last.finish_reason == "length"
    assert last.prompt_tokens + last.completion_tokens == 12


def test_an_abort_frees_the_slots_of_a_running_and_of_a_waiting_request() -> None:
    worker = CountingWorker(gate=threading.Semaphore(2))
    with running_engine(worker, running=1) as engine:
        running, first = make_request("running", "ab", max_tokens=100)
        waiting, second = make_request("waiting", "xy", max_tokens=100)
        engine.submit(running, waiting)
        first.first.wait(10)
        engine.abort("running")
        engine.abort("waiting")
        engine.abort("nobody")
        worker.gate.release(100)

        assert first.wait().finish_reason == second.wait().finish_reason == "abort"
        third, receiver = make_request("third", "mn", max_tokens=1)
        engine.submit(third)
        receiver.wait()
        assert slots_left(engine) == 256


def test_a_full_queue_refuses_at_once_and_takes_all_or_none() -> None:
    worker = CountingWorker(gate=threading.Semaphore(1))
    with running_engine(worker, running=1, queued=2) as engine:
        running, receiver = make_request("running", "ab", max_tokens=2)
        engine.submit(running)
        receiver.first.wait(10)
        three = [make_request(f"r{index}", "cd", max_tokens=1) for index in range(3)]
        engine.submit(three[0][0])
        with pytest.raises(QueueFull) as refusal:
            engine.submit(three[1][0], three[2][0])
        assert refusal.value.retry_after > 0

        engine.submit(three[1][0])
        with pytest.raises(QueueFull):
            engine.submit(three[2][0])
        worker.gate.release(100)
        assert [inbox.wait().finish_reason for _, inbox in three[:2]] == ["length", "length"]
        assert three[2][1].events == []


def test_an_idle_engine_takes_as_many_at_once_as_may_run_and_wait() -> None:
    worker = CountingWorker(gate=threading.Semaphore(0))
    with running_engine(worker, running=2, queued=1) as engine:
        three = [make_request(f"r{index}", "cd", max_tokens=1) for index in range(3)]
        engine.submit(*(request for request, _ in three))
        with pytest.raises(QueueFull):
            engine.submit(make_request("late", "cd", max_tokens=1)[0])
        worker.gate.release(100)
        assert [receiver.wait().finish_reason for _, receiver in three] == ["length"] * 3


def test_whoever_has_an_answer_may_ask_again_at_once() -> None:
    with running_engine(CountingWorker(), running=1, queued=1) as engine:
        for turn in range(20):
            pair = [make_request(f"{turn}-{index}", "cd", max_tokens=1) for index in range(2)]
            engine.submit(*(request for request, _ in pair))
            assert [receiver.wait().finish_reason for _, receiver in pair] == ["length"] * 2


def test_more_choices_than_ever_run_and_wait_are_the_clients_fault() -> None:
    with running_engine(CountingWorker(), running=1, queued=2) as engine:
        four = [make_request(f"r{index}", "cd", max_tokens=1) for index in range(4)]
        with pytest.raises(InvalidRequest, match="run and wait here: 3 .*--max-queued-requests") as refusal:
            engine.submit(*(request for request, _ in four))
        assert refusal.value.param == "n"


def test_the_queue_opens_again_when_waiting_requests_are_aborted() -> None:
    worker = CountingWorker(gate=threading.Semaphore(1))
    with running_engine(worker, running=1, queued=1) as engine:
        running, first = make_request("running", "ab", max_tokens=3)
        engine.submit(running)
        first.first.wait(10)
        waiting, second = make_request("waiting", "cd", max_tokens=1)
        engine.submit(waiting)
        engine.abort("waiting")
        engine.abort("running")
        worker.gate.release(1)
        second.wait()
        first.wait()
        third, receiver = make_request("third", "mn", max_tokens=1)
        worker.gate.release(10)
        engine.submit(third)
        assert receiver.wait().finish_reason == "length"


@pytest.mark.parametrize("prompt", ["", "a" * 128, "a" * 500])
def test_a_prompt_that_cannot_be_served_is_refused(prompt: str) -> None:
    with running_engine(CountingWorker()) as engine, pytest.raises(InvalidRequest):
        engine.submit(make_request("r", prompt)[0])


def test_a_token_that_the_model_does_not_have_is_refused() -> None:
    request, _ = make_request("r", "ab")
    request.prompt_ids.append(LetterTokenizer.vocab_size)
    with running_engine(CountingWorker()) as engine, pytest.raises(InvalidRequest, match="vocabulary of 27"):
        engine.submit(request)


def test_a_fault_of_one_request_ends_that_one_alone() -> None:
    worker = CountingWorker(
        fail_on=lambda request: "logits are not finite" if request.request_id == "bad" else None
    )
    with running_engine(worker) as engine:
        bad, bad_receiver = make_request("bad", "ab", max_tokens=5)
        good, good_receiver = make_request("good", "ab", max_tokens=5)
        engine.submit(bad, good)
        failed, done = bad_receiver.wait(), good_receiver.wait()

    assert (failed.finish_reason, failed.error) == ("error", "logits are not finite")
    assert done.finish_reason == "length" and good_receiver.text == "cdefg"


def test_a_receiver_that_fails_does_not_take_the_others_down() -> None:
    def broken(event: OutputEvent) -> None:
        raise ConnectionError("gone")

    with running_engine(CountingWorker()) as engine:
        engine.submit(Request("broken", letters("ab"), SamplingParams(max_tokens=50), sink=broken))
        good, receiver = make_request("good", "ab", max_tokens=5)
        engine.submit(good)
        assert receiver.wait().finish_reason == "length"


def test_a_fault_of_the_engine_answers_everybody_and_raises() -> None:
    def explode(request: Request) -> str | None:
        raise RuntimeError("out of memory")

    with running_engine(CountingWorker(fail_on=explode), running=1) as engine:
        one, first = make_request("one", "ab")
        two, second = make_request("two", "cd")
        engine.submit(one, two)
        errors = [first.wait().error, second.wait().error]
        with pytest.raises(EngineStopped):
            engine.submit(make_request("three", "ef")[0])

        stats = engine.stats()

    assert (stats.running, stats.waiting, stats.requests_finished["error"]) == (0, 0, 2)
    assert all(error is not None and "out of memory" in error for error in errors)
    assert [type(failure) for failure in engine.failures] == [RuntimeError]


def test_stop_ends_what_is_in_flight() -> None:
    worker = CountingWorker(gate=threading.Semaphore(1))
    with running_engine(worker) as engine:
        request, receiver = make_request("r", "ab", max_tokens=100)
        engine.submit(request)
        receiver.first.wait(10)
        engine.stop()
        worker.gate.release(10)
        assert receiver.wait().finish_reason == "abort"


def test_more_requests_than_slots_all_finish_with_the_right_text() -> None:
    """Eight requests want 8 x 30 slots of 64: admission, preemption and recompute, and nobody starves."""
    with running_engine(CountingWorker(3, 1), slots=64, context=64, running=8, queued=16) as engine:
        receivers: list[Receiver] = []
        for index in range(8):
            request, receiver = make_request(
                f"r{index}", "abcdefghij"[index:] + "abc"[: index % 3], max_tokens=20
            )
            engine.submit(request)
            receivers.append(receiver)
        for receiver in receivers:
            assert receiver.wait().finish_reason == "length"
            first = receiver.token_ids[0]
            assert receiver.token_ids == [(first - 1 + step) % 26 + 1 for step in range(20)]
        assert slots_left(engine) == 64
