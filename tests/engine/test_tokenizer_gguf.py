"""Tokenizers from GGUF metadata give the tokens of the tokenizer that the metadata was written from."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2Tokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from engine.tokenizer import Tokenizer, tokenizer_from_gguf
from models.base import ModelError
from models.default import default_model_path
from models.gguf_tokenizer import PRE_TOKENIZERS
from tests.engine.hard_texts import HARD_TEXTS, TRAINING_TEXTS
from tests.models.gguf_files import finish

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    *HARD_TEXTS,
    *(f"{token}a {token}{token}  b\n{token}\n{token}" for token in SPECIAL),
    "<|im_start |im_end|>",
]


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# How each family's own tokenizer normalises and cuts text, from transformers where it has the family.
FAMILIES: dict[str, tuple[Any, Any]] = {
    "gpt-2": (None, GPT2Tokenizer().backend_tokenizer.pre_tokenizer),
    "qwen2": (
        Qwen2Tokenizer().backend_tokenizer.normalizer,
        Qwen2Tokenizer().backend_tokenizer.pre_tokenizer,
    ),
    "llama-bpe": (None, _split(TikTokenConverter(vocab_file="").pattern)),
    "tekken": (None, _split(GGUF_PRE_TOKENIZER_SPLITS["tekken"])),
    "gpt-4o": (None, _split(GGUF_PRE_TOKENIZER_SPLITS["gpt-4o"])),
    "smollm": (
        None,
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    ),
}


@cache
def trained(family: str) -> tokenizers.Tokenizer:
    """A small tokenizer of that family, trained on the hard texts."""
    backend = tokenizers.Tokenizer(models.BPE())
    normalizer, backend.pre_tokenizer = FAMILIES[family]
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1200, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator(TRAINING_TEXTS, trainer)
    return backend


def write(
    path: Path,
    backend: tokenizers.Tokenizer,
    pre: str,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """A GGUF file of nothing but the tokenizer `backend`."""
    writer = gguf.GGUFWriter(path, "qwen2")
    vocab = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3 if token in SPECIAL else 1 for token, _ in vocab])
    writer.add_token_merges([" ".join(merge) for merge in json.loads(backend.to_str())["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    if extra:
        extra(writer)
    return finish(writer, path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf-tokenizers")


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, folder: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Tokenizer under test, and the reference."""
    backend = trained(request.param)
    return tokenizer_from_gguf(write(folder / f"{request.param}.gguf", backend, request.param)), backend


class TestByteLevel:
    @pytest.mark.parametrize("text", TEXTS)
    def test_tokens_equal_the_reference(
        self, pair: tuple[Tokenizer, tokenizers.Tokenizer], text: str
    ) -> None:
        tokenizer, reference = pair
        ids = reference.encode(text).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)

    def test_token_bytes_are_what_was_encoded(self, pair: tuple[Tokenizer, tokenizers.Tokenizer]) -> None:
        tokenizer, reference = pair
        for text in TEXTS:
            normal = unicodedata.normalize("NFC", text) if reference.normalizer else text
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert b"".join(map(tokenizer.token_bytes, ids)) == normal.encode()

    @pytest.mark.parametrize("family", PRE_TOKENIZERS)
    def test_no_text_is_lost_whatever_the_pre_tokenizer(self, folder: Path, family: str) -> None:
        tokenizer = tokenizer_from_gguf(write(folder / f"all-{family}.gguf", trained("gpt-2"), family))
        for text in TEXTS:
            normal = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[family].nfc else text
            assert tokenizer.decode(tokenizer.encode(text, False), skip_special_tokens=False) == normal

    def test_the_file_says_what_is_special(self, folder: Path) -> None:
        tokenizer = tokenizer_from_gguf(write(folder / "special.gguf", trained("gpt-2"), "gpt-2"))
        assert tokenizer.bos_token_id == 0
        assert tokenizer.eos_token_ids == {0, 2}  # the stated one, and another that ends a text
        assert tokenizer.special_token_ids == {0, 1, 2}
        assert tokenizer.vocab_size == trained("gpt-2").get_vocab_size()
        assert tokenizer.token_bytes(tokenizer.vocab_size) == b""

    @pytest.mark.parametrize("family", ["llama-bpe", "gpt-2"])
    @pytest.mark.parametrize("stated", [None, True, False])
    def test_bos_is_added_as_stated_else_as_the_family_does(
        self, folder: Path, family: str, stated: bool | None
    ) -> None:
        def extra(writer: gguf.GGUFWriter) -> None:
            if stated is not None:
                writer.add_add_bos_token(stated)

        tokenizer = tokenizer_from_gguf(write(folder / "bos.gguf", trained(family), family, extra))
        adds = family == "llama-bpe" if stated is None else stated
        assert tokenizer.encode("a", False) == trained(family).encode("a").ids
        assert tokenizer.encode("a") == [0] * adds + trained(family).encode("a").ids

    def test_chat_templates_of_the_file(self, folder: Path) -> None:
        def extra(writer: gguf.GGUFWriter) -> None:
            writer.add_chat_template(
                [
                    {"name": "default", "template": "{{ bos_token }}plain {{ messages[0].content }}"},
                    {"name": "tool_use", "template": "tools {{ tools | length }}"},
                ]
            )

        tokenizer = tokenizer_from_gguf(write(folder / "chat.gguf", trained("gpt-2"), "gpt-2", extra))
        messages = [{"role": "user", "content": "hi"}]
        assert tokenizer.apply_chat_template(messages) == "<|endoftext|>plain hi"
        assert tokenizer.apply_chat_template(messages, tools=[{"a": 1}]) == "tools 1"
        assert tokenizer.takes_tools
        assert tokenizer.chat_template == "{{ bos_token }}plain {{ messages[0].content }}"

    def test_unknown_pre_tokenizer_is_named(self, folder: Path) -> None:
        path = write(folder / "unknown.gguf", trained("gpt-2"), "tomorrow-bpe")
        with pytest.raises(ModelError, match=r"unknown\.gguf.*'tomorrow-bpe'.*supported.*qwen2"):
            tokenizer_from_gguf(path)

    def test_unknown_kind_is_named(self, folder: Path) -> None:
        writer = gguf.GGUFWriter(folder / "t5.gguf", "llama")
        writer.add_tokenizer_model("t5")
        with pytest.raises(ModelError, match=r"t5\.gguf.*'t5'.*gpt2, llama"):
            tokenizer_from_gguf(finish(writer, folder / "t5.gguf"))

    def test_merges_of_pieces_that_do_not_exist(self, folder: Path) -> None:
        writer = gguf.GGUFWriter(folder / "merges.gguf", "llama")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(["a", "b"])
        writer.add_token_merges(["a b"])
        with pytest.raises(ModelError, match=r"merges\.gguf.*corrupt"):
            tokenizer_from_gguf(finish(writer, folder / "merges.gguf"))


class TestSmolLM2:
    """The real vocabulary of the default model."""

    @pytest.fixture(scope="class")
    @classmethod
    def tokenizer(cls) -> Tokenizer:
        return tokenizer_from_gguf(default_model_path())

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls) -> Callable[[str], Sequence[int]]:
        """transformers reads the file, but not that every digit stands by itself: cut there first."""
        path = default_model_path()
        inner = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)

        def encode(text: str) -> list[int]:
            specials = "|".join(map(re.escape, inner.all_special_tokens))
            pieces = (
                part for span in re.split(f"({specials})", text) for part in _digits_apart(span, specials)
            )
            return [index for piece in pieces for index in inner.encode(piece, add_special_tokens=False)]

        return encode

    @pytest.mark.parametrize("text", TEXTS)
    def test_tokens_equal_the_reference(
        self, tokenizer: Tokenizer, reference: Callable[[str], Sequence[int]], text: str
    ) -> None:
        ids = tokenizer.encode(text)
        assert ids == reference(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()

    def test_chat(self, tokenizer: Tokenizer) -> None:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
        assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        assert tokenizer.decode(tokenizer.encode(prompt, False), skip_special_tokens=False) == prompt
        assert 2 in tokenizer.eos_token_ids


def _digits_apart(span: str, specials: str) -> list[str]:
    if re.fullmatch(specials, span):
        return [span]
    parts: list[str] = [""]
    for character in span:
        if unicodedata.category(character).startswith("N"):
            parts += [character, ""]
        else:
            parts[-1] += character
    return [part for part in parts if part]
