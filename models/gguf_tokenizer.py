"""The tokenizer that a GGUF file's metadata describes, built on the `tokenizers` library.

Two kinds occur in the supported architectures: byte-level BPE ("gpt2"), whose way of cutting text into words is
named by `tokenizer.ggml.pre`, and SentencePiece BPE ("llama"), whose merges follow from its scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from models.base import ModelError
from models.gguf_reader import GGUFHeader, read_header

SPACE = "▁"  # how SentencePiece spells a space

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}"
)


class _Words(NamedTuple):
    """How text is cut into words before merging: by `splits`, one after another, then by GPT-2's rule or not."""

    splits: tuple[str, ...] = ()
    gpt2: bool = False
    digits: bool = False  # every digit by itself, before anything else
    nfc: bool = False
    whole_words: bool = False  # a word that is itself a token needs no merges
    adds_bos: bool = False  # where the file does not say


_GPT2_WORDS = _Words(gpt2=True)
_DIGIT_WORDS = _Words(gpt2=True, digits=True)
_LLAMA3_WORDS = _Words((_LLAMA3,), whole_words=True, adds_bos=True)
_QWEN2_WORDS = _Words((_QWEN2,), nfc=True)

PRE_TOKENIZERS: dict[str, _Words] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), _GPT2_WORDS),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b"), _DIGIT_WORDS),
    **dict.fromkeys(("command-r", "exaone"), _Words(gpt2=True, digits=True, nfc=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3_WORDS),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _Words((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2_WORDS),
    "stablelm2": _Words((_QWEN2,)),
    "tekken": _Words((_TEKKEN,), whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _Words((_GPT4O,))),
    "deepseek-coder": _Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"), digits=True),
    "deepseek-v3": _Words((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
}

# Ends of a turn or a text. A file names one of them; a model that was trained on several may emit any.
_ENDS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<EOT>"}
    | {"<|end_of_text|>", "<｜end▁of▁sentence｜>"}
)
_TOKEN_NAMES = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
}


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """`special_tokens` maps "bos_token" and the like to their text, `chat_templates` a name to a Jinja source."""

    backend: Tokenizer
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]


class _Vocabulary:
    """The token arrays of a file, checked against each other."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.tokens: list[str] = list(header.require("tokenizer.ggml.tokens", list))
        self.types = self._numbers("token_type", np.ones(len(self.tokens), np.int32)).tolist()
        self.ids = {key: self._id(name) for key, name in _TOKEN_NAMES.items()}

    def error(self, text: str) -> ModelError:
        return ModelError(f"{self.header.path}: tokenizer: {text}")

    def scores(self) -> list[float]:
        return self._numbers("scores", None).tolist()

    def flag(self, key: str, default: bool) -> bool:
        return self.header.get(f"tokenizer.ggml.{key}", bool, default)

    def of_type(self, *types: TokenType) -> list[str]:
        return [token for token, type in zip(self.tokens, self.types, strict=True) if type in types]

    def _numbers(self, key: str, default: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
        name = f"tokenizer.ggml.{key}"
        values = self.header.get(name, np.ndarray, default)
        if values is None:
            raise self.error(f"metadata {name!r} is missing")
        if len(values) != len(self.tokens):
            raise self.error(f"{len(values)} entries in {name!r} for {len(self.tokens)} tokens")
        return values

    def _id(self, name: str) -> int | None:
        token_id = self.header.get(f"tokenizer.ggml.{name}", int)
        if token_id is not None and not 0 <= token_id < len(self.tokens):
            raise self.error(f"{name} {token_id} is outside the vocabulary of {len(self.tokens)}")
        return token_id


def read_gguf_tokenizer(path: Path) -> GGUFTokenizer:
    """Build the tokenizer of the GGUF file at `path`.

    ModelError if the file has none, or one of a kind or with a pre-tokenizer that is not supported.
    """
    header = read_header(path)
    kind = header.require("tokenizer.ggml.model", str)
    if kind not in _BUILDERS:
        raise ModelError(f"{path}: tokenizer {kind!r} is not supported; supported: {', '.join(_BUILDERS)}")
    vocabulary = _Vocabulary(header)
    try:
        backend, adds_bos = _BUILDERS[kind](vocabulary)
        _add_bos_and_eos(vocabulary, backend, adds_bos)
    except ModelError:
        raise
    except Exception as error:  # the library raises plain Exception for a merge it cannot make
        raise vocabulary.error(f"vocabulary or merges are corrupt: {error}") from error
    controls = zip(vocabulary.tokens, vocabulary.types, strict=True)
    ends = {
        index for index, (token, type) in enumerate(controls) if type == TokenType.CONTROL and token in _ENDS
    }
    stated = [header.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom")]
    return GGUFTokenizer(
        backend=backend,
        vocab_size=len(vocabulary.tokens),
        bos_token_id=vocabulary.ids["bos"],
        eos_token_ids=frozenset(ends.union(index for index in stated if index is not None)),
        special_tokens={
            f"{key}_token": vocabulary.tokens[index]
            for key, index in vocabulary.ids.items()
            if index is not None
        },
        chat_templates=_chat_templates(header),
    )


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    name = vocabulary.header.get("tokenizer.ggml.pre", str, "")
    words = PRE_TOKENIZERS.get(name)
    if words is None:
        raise vocabulary.error(
            f"pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; supported: {', '.join(PRE_TOKENIZERS)}"
        )
    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    merges: list[tuple[str, str]] = []
    for merge in vocabulary.header.require("tokenizer.ggml.merges", list):
        left, _, right = merge.partition(" ")
        if not (left in vocab and right in vocab and left + right in vocab):  # the library would panic
            raise vocabulary.error(f"merge {merge!r} is not of tokens in the vocabulary: the file is corrupt")
        merges.append((left, right))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=words.whole_words))
    if words.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if words.digits and words.gpt2:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in words.splits]
    if words.digits and not words.gpt2:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words.gpt2))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    _add_special_tokens(vocabulary, backend)
    return backend, words.adds_bos


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    # Converters spell user-defined tokens with spaces, as they stand in text; older ones did not.
    vocabulary.tokens = [
        token.replace(SPACE, " ") if type == TokenType.USER_DEFINED else token
        for token, type in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    unknown = vocabulary.ids["unk"]
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary.tokens)},
            merges=_merges(vocabulary),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = vocabulary.flag("add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    # A literal "▁" next to spaces is one run with them; a normalizer that adds a prefix would add it here too.
    _add_special_tokens(vocabulary, backend, normalized=not prefix)
    return backend, True


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best pieces first.

    The better of two pieces has the higher score, but Gemma's scores do not follow the order in which its pieces
    were learned; the order in the file does.
    """
    by_position = vocabulary.header.architecture == "gemma3"
    scores: Sequence[float] = range(0, -len(vocabulary.tokens), -1) if by_position else vocabulary.scores()
    pieces = {
        token: index
        for index, (token, type) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if type == TokenType.NORMAL
    }
    found: list[tuple[float, int, int, str, str]] = []
    for token, index in pieces.items():
        for cut in range(1, len(token)):
            left = pieces.get(token[:cut])
            if left is None:
                continue
            right = pieces.get(token[cut:])
            if right is not None:
                found.append((-scores[index], left, right, token[:cut], token[cut:]))
    found.sort()
    return [(left, right) for *_, left, right in found]


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _add_special_tokens(vocabulary: _Vocabulary, backend: Tokenizer, normalized: bool = False) -> None:
    """Keep control and user-defined tokens whole wherever they stand in a text.

    `normalized` finds the user-defined ones in the text as the normalizer leaves it.
    """
    special = vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    plain = vocabulary.of_type(TokenType.USER_DEFINED)
    backend.add_tokens([AddedToken(token, normalized=normalized) for token in plain])


def _add_bos_and_eos(vocabulary: _Vocabulary, backend: Tokenizer, adds_bos: bool) -> None:
    bos = vocabulary.ids["bos"] if vocabulary.flag("add_bos_token", adds_bos) else None
    eos = vocabulary.ids["eos"] if vocabulary.flag("add_eos_token", False) else None
    set_bos_and_eos(backend, *(None if index is None else vocabulary.tokens[index] for index in (bos, eos)))


def set_bos_and_eos(backend: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Put the token `bos` before, and `eos` behind, each text that is encoded with special tokens."""
    names = [name for name in (bos, eos) if name is not None]
    backend.post_processor = processors.TemplateProcessing(
        single=[*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])],
        special_tokens=[(name, backend.token_to_id(name)) for name in dict.fromkeys(names)],
    )


def _chat_templates(header: GGUFHeader) -> dict[str, str]:
    """The file's chat templates: "default", and those of its named ones."""
    prefix = "tokenizer.chat_template"
    found = {
        key.removeprefix(prefix).removeprefix(".") or "default": header.require(key, str)
        for key in header.metadata
        if key == prefix or key.startswith(f"{prefix}.")
    }
    return found
