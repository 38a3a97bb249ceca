"""SentencePiece vocabularies in GGUF files, held to the sentencepiece library itself."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from sentencepiece import SentencePieceProcessor

from engine.tokenizer import Tokenizer, tokenizer_from_gguf
from tests.engine.hard_texts import HARD_TEXTS, TRAINING_TEXTS
from tests.models.gguf_files import finish

# Gemma keeps runs of newlines and of spaces, and its turn marks, as user-defined symbols.
USER_DEFINED = ["\n", "\n\n", "\n\n\n", "\t", *("▁" * length for length in range(2, 9)), "<table>"]
STYLES: dict[str, dict[str, Any]] = {
    "llama": {"add_dummy_prefix": True},
    "gemma3": {"add_dummy_prefix": False, "user_defined_symbols": USER_DEFINED},
}
# <s> and </s> are told apart from text by us, as by transformers, but not by sentencepiece.
TEXTS = [text for text in HARD_TEXTS if "<s>" not in text and "\x00" not in text]


def train(**settings: Any) -> SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING_TEXTS),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **settings,
    )
    return SentencePieceProcessor(model_proto=model.getvalue())


def token_type(processor: SentencePieceProcessor, index: int, user_defined: list[str]) -> int:
    if processor.is_unknown(index):
        return 2
    if processor.is_control(index):
        return 3
    if processor.is_byte(index):
        return 6
    return 4 if processor.id_to_piece(index) in user_defined else 1


def write(path: Path, processor: SentencePieceProcessor, style: str) -> Path:
    writer = gguf.GGUFWriter(path, style)
    indices = range(processor.get_piece_size())
    user_defined = STYLES[style].get("user_defined_symbols", [])
    types = [token_type(processor, index, user_defined) for index in indices]
    pieces = [processor.id_to_piece(index) for index in indices]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(
        [piece.replace("▁", " ") if type == 4 else piece for piece, type in zip(pieces, types, strict=True)]
    )
    writer.add_token_scores([processor.get_score(index) for index in indices])
    writer.add_token_types(types)
    writer.add_unk_token_id(processor.unk_id())
    writer.add_bos_token_id(processor.bos_id())
    writer.add_eos_token_id(processor.eos_id())
    writer.add_add_space_prefix(STYLES[style]["add_dummy_prefix"])
    return finish(writer, path)


@pytest.fixture(scope="module", params=STYLES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, SentencePieceProcessor]:
    processor = train(**STYLES[request.param])
    path = write(tmp_path_factory.mktemp("spm") / "model.gguf", processor, request.param)
    return tokenizer_from_gguf(path), processor


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    processor = train(**STYLES["llama"])
    return tokenizer_from_gguf(write(tmp_path_factory.mktemp("spm") / "llama.gguf", processor, "llama"))


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_equal_sentencepiece(pair: tuple[Tokenizer, SentencePieceProcessor], text: str) -> None:
    tokenizer, processor = pair
    ids = processor.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.encode(text) == [processor.bos_id(), *ids]
    assert tokenizer.decode(ids) == processor.decode(ids)


def test_token_bytes_are_the_text(pair: tuple[Tokenizer, SentencePieceProcessor]) -> None:
    tokenizer, _ = pair
    for text in TEXTS:
        joined = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, False)))
        spelled = text.replace("▁", " ")  # sentencepiece cannot tell them apart
        assert joined in (spelled.encode(), f" {spelled}".encode() if spelled else b"")


def test_bytes_without_a_piece_fall_back(pair: tuple[Tokenizer, SentencePieceProcessor]) -> None:
    tokenizer, processor = pair
    ids = tokenizer.encode("🜁", False)
    assert [tokenizer.token_bytes(index) for index in ids][-4:] == [b"\xf0", b"\x9f", b"\x9c", b"\x81"]
    assert tokenizer.decode(ids) == "🜁"
    assert tokenizer.decode(ids[:-1]) == processor.decode(ids[:-1])


def test_special_tokens_within_text_are_whole(llama: Tokenizer) -> None:
    ids = llama.encode("<s>a</s> b", False)
    assert ids[0] == llama.bos_token_id
    assert set(ids) & llama.eos_token_ids
    assert llama.decode(ids) == "a  b"
    assert llama.decode(ids, skip_special_tokens=False) == "<s> a</s>  b"
