"""Tokenizers from Hugging Face folders do what transformers does with the same folder."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.chat_template import ChatTemplateError
from engine.errors import InvalidRequest
from engine.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_folder
from models.base import ModelError
from models.hf_config import read_config
from models.loader import ModelFiles
from tests.engine.hard_texts import HARD_TEXTS, TRAINING_TEXTS

TEXTS = [*HARD_TEXTS, "<s>a</s> <unk>b<|tool|>c <|to"]
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
MESSAGES = [{"role": "user", "content": "hello"}]


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<unk>"],
        show_progress=False,
    )
    backend.train_from_iterator(TRAINING_TEXTS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def sentencepiece_style() -> tokenizers.Tokenizer:
    """As Llama 2's own tokenizer.json is built."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=60,
        show_progress=False,
    )
    backend.train_from_iterator(TRAINING_TEXTS, trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # bytes are plain entries of the vocabulary
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


BACKENDS = {"byte-level": byte_level, "sentencepiece": sentencepiece_style}


def save(folder: Path, backend: tokenizers.Tokenizer, **settings: Any) -> Path:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **settings
    )
    fast.add_tokens(["<|tool|>"])
    fast.save_pretrained(folder)
    return folder


def model_files(folder: Path) -> ModelFiles:
    config = read_config({"model_type": "llama", "head_dim": 2} | dict.fromkeys(SIZES, 8))
    return ModelFiles("hf", folder, (), 0, config, folder.name)


@pytest.fixture(scope="module", params=BACKENDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("hf") / request.param, BACKENDS[request.param]())


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return tokenizer_from_folder(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_and_text_equal_transformers(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    for special in (True, False):
        ids = reference.encode(text, add_special_tokens=special)
        assert tokenizer.encode(text, add_special_tokens=special) == ids
        for skip in (True, False):
            expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip) == expected


def test_token_bytes_join_to_what_decode_reads(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
        decoded = tokenizer.decode(ids, False)
        assert joined in (decoded, f" {decoded}")  # SentencePiece's first space is not part of the text


def test_special_ids_are_those_of_transformers(tokenizer: Tokenizer, reference: Any) -> None:
    assert tokenizer.bos_token_id == reference.bos_token_id
    assert tokenizer.special_token_ids == set(reference.all_special_ids)
    assert tokenizer.vocab_size == len(reference)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_flags_of_the_config_add_bos_and_eos(tmp_path: Path, bos: bool, eos: bool) -> None:
    save(tmp_path, byte_level(), add_bos_token=bos, add_eos_token=eos)
    expected = AutoTokenizer.from_pretrained(tmp_path).encode("abc")
    assert tokenizer_from_folder(tmp_path).encode("abc") == expected
    assert (expected[0] == 0, expected[-1] == 1) == (bos, eos)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {1}),
        ({"config.json": {"eos_token_id": 5}}, {1, 5}),
        ({"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": [6, 7]}}, {1, 6, 7}),
        ({"generation_config.json": {"eos_token_id": 6}}, {1, 6}),
    ],
)
def test_every_stated_end_of_text_counts(
    tmp_path: Path, files: dict[str, dict[str, Any]], expected: set[int]
) -> None:
    save(tmp_path, byte_level())
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert tokenizer_from_folder(tmp_path).eos_token_ids == expected


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=100)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert (
        tokenizer_from_folder(tmp_path).decode(tokenizer_from_folder(tmp_path).encode("a long text"))
        == "a long text"
    )


class TestChatTemplates:
    def test_one_template_in_a_file(self, tmp_path: Path) -> None:
        save(tmp_path, byte_level(), chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
        assert (tmp_path / "chat_template.jinja").is_file()
        assert tokenizer_from_folder(tmp_path).apply_chat_template(MESSAGES) == "<s>hello</s>"

    def test_named_templates_in_files(self, tmp_path: Path) -> None:
        save(tmp_path, byte_level(), chat_template={"default": "plain", "tool_use": "tools"})
        tokenizer = tokenizer_from_folder(tmp_path)
        assert tokenizer.apply_chat_template(MESSAGES) == "plain"
        assert tokenizer.apply_chat_template(MESSAGES, tools=[{"type": "function"}]) == "tools"

    @pytest.mark.parametrize(
        ("stated", "tools"),
        [
            ("plain", "plain"),
            ([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}], "tools"),
        ],
    )
    def test_templates_in_the_config(self, tmp_path: Path, stated: Any, tools: str) -> None:
        save(tmp_path, byte_level())
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": stated}))
        tokenizer = tokenizer_from_folder(tmp_path)
        assert tokenizer.chat_template == "plain"
        assert tokenizer.apply_chat_template(MESSAGES) == "plain"
        assert tokenizer.apply_chat_template(MESSAGES, tools=[{}]) == tools

    def test_a_file_of_the_user_replaces_them_all(self, tmp_path: Path) -> None:
        folder = save(tmp_path / "model", byte_level(), chat_template={"default": "a", "tool_use": "b"})
        (tmp_path / "own.jinja").write_text("mine")
        tokenizer = load_tokenizer(model_files(folder), str(tmp_path / "own.jinja"))
        assert tokenizer.apply_chat_template(MESSAGES, tools=[{}]) == "mine"
        with pytest.raises(ModelError, match=r"absent\.jinja"):
            load_tokenizer(model_files(folder), str(tmp_path / "absent.jinja"))

    def test_one_that_does_not_compile_is_named(self, tmp_path: Path) -> None:
        folder = save(tmp_path / "model", byte_level(), chat_template="{% if %}")
        with pytest.raises(ModelError, match=r"model: the chat template cannot be compiled"):
            load_tokenizer(model_files(folder))
        (tmp_path / "own.jinja").write_text("{{ unclosed")
        with pytest.raises(ModelError, match=r"own\.jinja: the chat template cannot be compiled"):
            load_tokenizer(model_files(folder), str(tmp_path / "own.jinja"))

    @pytest.mark.parametrize("stated", [7, ["plain"], [{"name": "default"}]])
    def test_templates_of_no_known_form(self, tmp_path: Path, stated: Any) -> None:
        save(tmp_path, byte_level())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": stated}))
        with pytest.raises(ModelError, match=r"tokenizer_config\.json.*chat_template"):
            tokenizer_from_folder(tmp_path)

    def test_a_model_without_one_says_so(self, tmp_path: Path) -> None:
        tokenizer = tokenizer_from_folder(save(tmp_path, byte_level()))
        assert tokenizer.chat_template is None
        with pytest.raises(ChatTemplateError, match="no chat template"):
            tokenizer.apply_chat_template(MESSAGES)


class TestRefusals:
    def test_no_tokenizer_json(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"no tokenizer\.json"):
            tokenizer_from_folder(tmp_path)

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "BPE"}}'])
    def test_a_corrupt_tokenizer_json(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            tokenizer_from_folder(tmp_path)

    def test_merges_of_tokens_that_do_not_exist(self, tmp_path: Path) -> None:
        backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
        state = json.loads(backend.to_str())
        del state["model"]["vocab"]["ab"]
        (tmp_path / "tokenizer.json").write_text(json.dumps(state))
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            tokenizer_from_folder(tmp_path)

    @pytest.mark.parametrize("content", ["{", "[1]"])
    def test_a_corrupt_config(self, tmp_path: Path, content: str) -> None:
        save(tmp_path, byte_level())
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
            tokenizer_from_folder(tmp_path)

    def test_half_a_surrogate_pair_is_the_request_s_fault(self, tokenizer: Tokenizer) -> None:
        with pytest.raises(InvalidRequest, match="not valid Unicode"):
            tokenizer.encode("a\ud83d")


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_gone_through(tokenizer: Tokenizer, work: str) -> None:
    text = "a few words " * 50_000
    ids = tokenizer.encode(text) * 20
    thread = threading.Thread(
        target=lambda: tokenizer.encode(text) if work == "encode" else tokenizer.decode(ids)
    )
    thread.start()
    turns = 0
    while thread.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 5  # a held interpreter lock would leave one or two: before the call, and behind it
