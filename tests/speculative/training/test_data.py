"""Training text: which tokens are the target's, what blocks are drawn, and texts that the target writes."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import InvalidRequest
from engine.request import OutputEvent, Request
from engine.tokenizer import Tokenizer, tokenizer_from_folder
from speculative.training.data import Example, Sampler, blocks_at, encode, frequent_tokens, read_examples
from speculative.training.generate import Quota, Writing, answered, made_up, write_out, writings
from tests.speculative.training.conftest import make_example

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="module")
def tokenizer(target_folder: Path) -> Tokenizer:
    return tokenizer_from_folder(target_folder, CHAT)


def turns(*contents: str) -> list[dict[str, str]]:
    return [
        {"role": ("user", "assistant")[number % 2], "content": content}
        for number, content in enumerate(contents)
    ]


def answers_of(tokenizer: Tokenizer, ids: Sequence[int], spans: Sequence[Sequence[int]]) -> list[str]:
    return [tokenizer.decode(ids[start:end], skip_special_tokens=False) for start, end in spans]


def test_a_conversation_has_the_servers_tokens_and_its_answers_with_their_ends(tokenizer: Tokenizer) -> None:
    messages = turns("hi", "yes", "more", "no")
    ids, spans = encode(tokenizer, messages, finished=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<user>hi</s><assistant>yes</s><user>more</s><assistant>no</s>"
    )
    assert answers_of(tokenizer, ids, spans) == ["yes</s>", "no</s>"]
    prompt = tokenizer.apply_chat_template(messages[:3])
    assert ids[: spans[1][0]] == tokenizer.encode(prompt, add_special_tokens=False)


def test_an_answer_that_was_cut_has_no_end(tokenizer: Tokenizer) -> None:
    ids, spans = encode(tokenizer, turns("hi", "yes"), finished=False)
    assert answers_of(tokenizer, ids, spans) == ["yes"]


def test_lines_are_cut_to_length_and_those_left_without_an_answer_are_left_out(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "data.jsonl"
    records = [
        {"messages": turns("hi", "yes"), "finished": True},
        {"token_ids": list(range(30)), "answers": [[4, 6], [28, 30]]},
        {"token_ids": list(range(30)), "answers": [[25, 30]]},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"token_ids": [1, 2')
    first, second = read_examples([path], tokenizer, 26)
    assert tokenizer.decode(first.ids[first.ends > 0].tolist()) == "yes"[: 26 - 23]
    assert second.ends.tolist() == [0] * 4 + [6] * 2 + [0] * 20
    assert second.anchors.tolist() == [4]


def test_blocks_end_where_the_answer_does() -> None:
    example = Example(
        np.arange(10, 20, dtype=np.int32), np.array([0, 0, 5, 5, 5, 0, 0, 10, 10, 10], np.int32)
    )
    blocks = blocks_at([example], [0], [np.array([2, 7, 8])], 4)
    assert blocks.tokens.tolist() == [[[12, 13, 14, -1], [17, 18, 19, -1], [18, 19, -1, -1]]]


def test_the_draft_vocabulary_is_of_answers_only_and_sorted() -> None:
    example = Example(np.array([9, 9, 9, 5, 3, 5, 4], np.int32), np.array([0, 0, 0, 7, 7, 7, 7], np.int32))
    assert frequent_tokens([example], 12, 3).tolist() == [3, 4, 5]
    assert frequent_tokens([example], 12, 4).tolist() == [0, 3, 4, 5]


def test_an_epoch_has_each_text_once_and_is_the_same_after_a_restart() -> None:
    examples = [make_example(number, 20 + 3 * (number % 20), 6) for number in range(50)]
    members = list(range(0, 50, 2))

    def drawn(epoch: int) -> list[tuple[list[int], list[list[int]]]]:
        sampler = Sampler(examples, members, 4, seed=1)
        batches = [sampler.batch(epoch, index, 4, 3) for index in range(sampler.batches)]
        return [(batch.members, batch.anchors.tolist()) for batch in batches]

    first = drawn(0)
    assert first == drawn(0)
    assert Counter(member for batch, _ in first for member in batch) == Counter(members)
    assert first != drawn(1)
    lengths = [[len(examples[member].ids) for member in batch] for batch, _ in first]
    padded = sum(len(batch) * max(batch) for batch in lengths)
    assert padded < 1.25 * sum(map(sum, lengths))


# -- texts that the target writes ----------------------------------------------------------------------------------


class Target:
    """An engine that answers at once, with `answer`, in two parts; it notes the prompts."""

    def __init__(self, tokenizer: Tokenizer, answer: str = "ok", room: int = 10_000) -> None:
        self.tokenizer, self.answer, self.room = tokenizer, answer, room
        self.prompts: list[str] = []

    def submit(self, request: Request) -> None:
        if len(request.prompt_ids) > self.room:
            raise InvalidRequest("too long")
        self.prompts.append(self.tokenizer.decode(request.prompt_ids, skip_special_tokens=False))
        ids = [*self.tokenizer.encode(self.answer), 256]
        request.sink(OutputEvent(request.request_id, self.answer, tuple(ids[:1])))
        request.sink(OutputEvent(request.request_id, "", tuple(ids[1:]), finish_reason="stop"))


def written(
    tokenizer: Tokenizer, submit: Callable[[Request], None], source: str, count: int = 100
) -> list[dict[str, Any]]:
    texts = list(zip(range(count), writings(source, tokenizer, 0, 8), strict=False))
    return list(write_out([text for _, text in texts], submit, lambda: 3))


def test_made_up_conversations_begin_with_a_question_of_the_targets_own(tokenizer: Tokenizer) -> None:
    target = Target(tokenizer)
    records = written(tokenizer, target.submit, "self", 20)
    assert {record["id"] for record in records} == {f"self-{number}" for number in range(20)}
    for record in records:
        users = [message["content"] for message in record["messages"][::2]]
        assert all(user.endswith("ok") for user in users)
        assert answers_of(tokenizer, record["token_ids"], record["answers"]) == ["ok</s>"] * len(users)
        assert record["finished"]
        assert f"<user>{users[0]}</s><assistant>" in target.prompts
    assert {len(record["messages"]) for record in records} == {2, 4}
    assert target.prompts[0].startswith("<user>") and not target.prompts[0].endswith("ok")


def test_given_conversations_get_new_answers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "given.jsonl"
    lines = [{"messages": turns("a", "old", "b", "old")}, {"prompt": "c"}, {"turns": ["d", "e"]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = written(tokenizer, Target(tokenizer).submit, str(path))
    assert {record["id"]: record["messages"] for record in records} == {
        "given.jsonl-0": turns("a", "ok", "b", "ok"),
        "given.jsonl-1": turns("c", "ok"),
        "given.jsonl-2": turns("d", "ok", "e", "ok"),
    }


def test_passages_are_continued(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("short\n\n" + "word " * 100)
    (record,) = written(tokenizer, Target(tokenizer).submit, str(path))
    assert tokenizer.decode(record["token_ids"]) == " ".join(["word"] * 40) + "ok"
    assert answers_of(tokenizer, record["token_ids"], record["answers"]) == ["ok</s>"]


def test_what_does_not_fit_is_left_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "given.jsonl"
    path.write_text(json.dumps({"prompt": "x" * 200}) + "\n" + json.dumps({"prompt": "y"}) + "\n")
    records = written(tokenizer, Target(tokenizer, room=100).submit, str(path))
    assert [record["id"] for record in records] == ["given.jsonl-1"]


def test_so_many_run_at_once(tokenizer: Tokenizer) -> None:
    held: list[Request] = []

    def submit(request: Request) -> None:
        held.append(request)
        if len(held) == 3:  # only then does anything come back
            for waiting in held:
                waiting.sink(OutputEvent(waiting.request_id, "z", (5,), finish_reason="length"))
            held.clear()

    texts = [(str(n), _one(tokenizer)) for n in range(6)]
    assert len(list(write_out(texts, submit, lambda: 3))) == 6


def test_no_more_texts_are_begun_than_the_missing_tokens_call_for() -> None:
    quota = Quota(tokens=300, answer_tokens=100, most=16)
    assert quota.texts() == 3
    quota.add(20)  # of 280 that are missing, at 60 a text
    assert quota.texts() == 5
    quota.add(280)
    assert quota.texts() == 0


def test_no_more_texts_are_begun_than_may_run_at_once() -> None:
    assert Quota(tokens=10_000, answer_tokens=100, most=16).texts() == 16


def test_little_text_is_written_where_little_is_wanted(tokenizer: Tokenizer) -> None:
    quota = Quota(tokens=300, answer_tokens=100, most=64)
    for record in write_out(writings("self", tokenizer, 0, 8), Target(tokenizer).submit, quota.texts):
        quota.add(len(record["token_ids"]))
    assert 300 <= quota.written < 600


def _one(tokenizer: Tokenizer) -> Writing:
    return answered(tokenizer, turns("q"), random.Random(0), 8)


def test_an_engine_that_fails_is_not_mistaken_for_a_short_answer(tokenizer: Tokenizer) -> None:
    def submit(request: Request) -> None:
        request.sink(OutputEvent(request.request_id, "", (), finish_reason="error", error="no memory"))

    with pytest.raises(RuntimeError, match="no memory"):
        list(write_out([("x", made_up(tokenizer, random.Random(0), 8))], submit, lambda: 1))
