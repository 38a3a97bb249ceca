"""Text to token ids and back, special tokens, and the chat template, whatever file they came from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from engine.chat_template import ChatTemplate, ChatTemplateError, Message
from engine.errors import InvalidRequest
from models.base import ModelError
from models.gguf_tokenizer import SPACE, read_gguf_tokenizer, set_bos_and_eos

if TYPE_CHECKING:
    from models.loader import ModelFiles


class Tokenizer:
    """A tokenizer over the `tokenizers` library. Immutable, and safe to use from several threads.

    vocab_size: one more than the highest token id.
    eos_token_ids: tokens that end a text or a turn. special_token_ids: those that `decode` leaves out.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        vocab_size: int,
        bos_token_id: int | None,
        eos_token_ids: frozenset[int],
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._added_text = {index: token.content for index, token in added.items()}
        self._to_bytes = _token_bytes_reader(backend)
        self._known_bytes = lru_cache(maxsize=1 << 14)(self._read_bytes)  # texts are made of few tokens
        self._templates = {
            name: ChatTemplate(source, special_tokens) for name, source in (chat_templates or {}).items()
        }
        self.vocab_size = vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.special_token_ids = frozenset(index for index, token in added.items() if token.special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens that are spelled out in it are recognised either way.

        `add_special_tokens` puts the model's own before and behind it (a BOS, say). InvalidRequest if `text` holds
        half of a surrogate pair.
        """
        try:
            # The library lets other threads run meanwhile only in calls for a batch.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:  # how the library refuses a str that UTF-8 cannot spell
            raise InvalidRequest(
                "the text is not valid Unicode: it holds half of a surrogate pair"
            ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are no character become U+FFFD; ids that are no token are left out."""
        return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for within a text; it need not be whole characters. Empty if it is no token."""
        return self._known_bytes(token_id)

    def _read_bytes(self, token_id: int) -> bytes:
        text = self._added_text.get(token_id)
        if text is not None:
            return text.encode()
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._to_bytes(token)

    @property
    def chat_template(self) -> str | None:
        """The Jinja source that a chat without tools is rendered by."""
        template = self._templates.get("default")
        return template.source if template else None

    @property
    def takes_tools(self) -> bool:
        """Whether the template that a chat with tools is rendered by has a place for them, or there is none at all."""
        template = self._template_for(with_tools=True)
        return template is None or "tools" in template.free_variables

    def _template_for(self, with_tools: bool) -> ChatTemplate | None:
        return (self._templates.get("tool_use") if with_tools else None) or self._templates.get("default")

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The prompt text for a chat: encode it without adding special tokens. ChatTemplateError if it cannot be."""
        template = self._template_for(bool(tools))
        if template is None:
            raise ChatTemplateError("the model has no chat template; give one with --chat-template")
        return template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **template_kwargs,
        )


def load_tokenizer(files: ModelFiles, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a model. `chat_template` is the path of a Jinja file that replaces the model's own.

    ModelError, naming the file, for a tokenizer or a template that cannot be used.
    """
    replacement = None if chat_template is None else _read_text(Path(chat_template))
    load = tokenizer_from_gguf if files.kind == "gguf" else tokenizer_from_folder
    try:
        return load(files.path, replacement)
    except ChatTemplateError as error:
        raise ModelError(f"{chat_template or files.path}: {error}") from error


def tokenizer_from_gguf(path: Path, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer in a GGUF file's metadata. `chat_template` is a Jinja source that replaces the file's own."""
    found = read_gguf_tokenizer(path)
    return Tokenizer(
        found.backend,
        vocab_size=found.vocab_size,
        bos_token_id=found.bos_token_id,
        eos_token_ids=found.eos_token_ids,
        special_tokens=found.special_tokens,
        chat_templates=_replaced(found.chat_templates, chat_template),
    )


def tokenizer_from_folder(path: Path, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, from its tokenizer.json. ModelError if that is absent or corrupt."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{path}: no tokenizer.json; tokenizers in other forms are not supported")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except BaseException as error:
        # For a file it cannot read the library raises plain Exception, or panics, which is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{file}: corrupt or of an unknown form: {error}") from error
    config = _read_json(path / "tokenizer_config.json")
    special_tokens = _special_tokens({**_read_json(path / "special_tokens_map.json"), **config})
    known = [text for text in special_tokens.values() if backend.token_to_id(text) is not None]
    backend.add_special_tokens(known)
    if config.get("add_bos_token") is not None or config.get("add_eos_token") is not None:
        set_bos_and_eos(
            backend,
            *(
                special_tokens.get(f"{name}_token") if config.get(f"add_{name}_token") else None
                for name in ("bos", "eos")
            ),
        )
    ids = {name: backend.token_to_id(text) for name, text in special_tokens.items()}
    generation = _read_json(path / "generation_config.json")
    ends = generation.get("eos_token_id", _read_json(path / "config.json").get("eos_token_id"))
    stated = ends if isinstance(ends, list) else [ends]
    return Tokenizer(
        backend,
        vocab_size=max(backend.get_vocab().values(), default=-1) + 1,
        bos_token_id=ids.get("bos_token"),
        eos_token_ids=frozenset(index for index in (*stated, ids.get("eos_token")) if isinstance(index, int)),
        special_tokens=special_tokens,
        chat_templates=_replaced(_folder_templates(path, config), chat_template),
    )


def _folder_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Files win over tokenizer_config.json, as in transformers."""
    files = {"default": path / "chat_template.jinja"} | {
        file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))
    }
    found = {name: _read_text(file) for name, file in files.items() if file.is_file()}
    stated = config.get("chat_template")
    if found or stated is None:
        return found
    if isinstance(stated, str):
        return {"default": stated}
    try:
        return {entry["name"]: entry["template"] for entry in stated}
    except (TypeError, KeyError) as error:
        raise ModelError(f"{path / 'tokenizer_config.json'}: chat_template is not of a known form") from error


def _replaced(templates: dict[str, str], replacement: str | None) -> dict[str, str]:
    return templates if replacement is None else {"default": replacement}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named tokens of a tokenizer_config.json, which spells them as text or as an object with `content`."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ModelError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value


def _token_bytes_reader(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """How the text of a vocabulary entry spells bytes, found out by asking the decoder."""
    decode = backend.decoder.decode if backend.decoder is not None else "".join
    if decode(["Ġ"]) == " ":
        return _byte_level_bytes
    if decode(["a", f"{SPACE}b"]) == "a b":
        return _sentencepiece_bytes
    return str.encode


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character: itself if it is one, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_ALPHABET[character] for character in token)
    except KeyError:  # not written in the alphabet, so it is text
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(SPACE, " ").encode()
