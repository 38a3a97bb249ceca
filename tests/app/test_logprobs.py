"""Where the tokens of a completion lie in its text."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from app.logprobs import CompletionLogprobWriter
from engine.request import TokenLogprob
from engine.tokenizer import Tokenizer

VOCAB = {"<s>": 0, "</s>": 1, "▁a": 2, "▁b": 3, "<0xC3>": 4, "<0xA9>": 5}


@pytest.fixture
def tokenizer() -> Tokenizer:
    """As Llama 2's: words begin with a space, which the first word of a text does without."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=VOCAB, merges=[], byte_fallback=True))
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return Tokenizer(backend, vocab_size=len(VOCAB), bos_token_id=0, eos_token_ids=frozenset({1}))


def of(*tokens: str) -> list[tuple[int, TokenLogprob]]:
    return [(VOCAB[token], TokenLogprob(VOCAB[token], -1.0)) for token in tokens]


@pytest.mark.parametrize(("skip", "offsets"), [(True, [0, 1, 1, 3]), (False, [0, 1, 5, 7])])
def test_a_special_token_takes_the_place_that_it_has_in_the_text(
    tokenizer: Tokenizer, skip: bool, offsets: list[int]
) -> None:
    tokens = ["▁b", "</s>", "▁a", "▁b"]
    ids = [VOCAB[token] for token in tokens]
    assert tokenizer.decode(ids, skip) == ("b a b" if skip else "b</s> a b")
    assert CompletionLogprobWriter(tokenizer, skip, ()).write(of(*tokens)).text_offset == offsets


def test_neither_a_bos_nor_the_first_space_moves_an_echo(tokenizer: Tokenizer) -> None:
    prompt = of("<s>", "▁a", "▁b")
    writer = CompletionLogprobWriter(tokenizer, True, [token for token, _ in prompt])
    assert writer.write_prompt(prompt, "a b").text_offset == [0, 0, 1]
    assert writer.write(of("▁a", "▁b")).text_offset == [3, 5], "the text is 'a b' and then ' a b'"


def test_an_output_does_not_complete_a_character_of_the_echo(tokenizer: Tokenizer) -> None:
    prompt = of("▁a", "<0xC3>")
    writer = CompletionLogprobWriter(tokenizer, True, [token for token, _ in prompt])
    assert writer.write_prompt(prompt, "a\ufffd").text_offset == [0, 1]
    assert writer.write(of("<0xA9>", "▁b")).text_offset == [2, 3]
