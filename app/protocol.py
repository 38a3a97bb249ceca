"""Wire types of requests: what the OpenAI API and vLLM's extensions of it accept, checked as they are parsed.

Types are strict (a string is not a number). Fields that would change the answer in ways not supported here are refused
by name, and so are slips in a name; other unknown fields are ignored, as clients send some of their own.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationError,
    model_validator,
)

from app.errors import ApiError, bad_request
from engine.request import SamplingParams, SpeculationParams

MAX_LOGPROBS = 20
MAX_CHOICES = 2048  # of one API request, all prompts together
MAX_TOKEN_IDS = 1024  # that a request biases, or stops at: each costs time at every token
DEFAULT_COMPLETION_TOKENS = 16
_MAX_INT64 = 2**63 - 1
_MOST_ERRORS = 1000
_MOST_EXTRA = 64  # fields that we do not know: for each, a known one is looked for that it may mean

TokenId = Annotated[int, Field(ge=0)]
ModelT = TypeVar("ModelT", bound=BaseModel)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and item >= 0 for item in value)


def _check_prompts(value: Any) -> list[str] | list[list[int]]:
    """One prompt or several, as text or as token ids; always returned as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if _is_token_list(value):
        return [value]
    several = isinstance(value, list) and bool(value)
    if several and (all(isinstance(item, str) for item in value) or all(map(_is_token_list, value))):
        return value
    raise ValueError(
        "must be a string, a non-empty list of strings, a list of token ids, or a list of lists of token ids"
    )


def _join_text_parts(value: Any) -> Any:
    """Message content as one string. Text parts are joined by newlines; other parts are not supported."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"content parts of type {kind!r} are not supported: only 'text' is")
        if not isinstance(part.get("text"), str):
            raise ValueError("a text part needs a string 'text'")
        texts.append(part["text"])
    return "\n".join(texts)


StopStrings = Annotated[
    list[Annotated[str, StringConstraints(min_length=1)]], Field(max_length=16), BeforeValidator(_as_list)
]


class WireModel(BaseModel):
    """Part of a request body."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())


class Speculation(WireModel):
    """A request's own speculation. `num_draft_tokens` counts verified rows, the last token included."""

    model_config = ConfigDict(extra="forbid")  # it is Tandem's own: a name that it lacks is a slip

    algorithm: str | None = None
    num_draft_tokens: int | None = Field(None, ge=1, le=1024)


class StreamOptions(WireModel):
    """What a stream carries beside the text."""

    include_usage: bool | None = None


_CHANGES_THE_ANSWER: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "ebnf": (),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora": ([],),
    "lora_path": (),
    "lora_request": (),
    "mirostat": (0,),
    "num_beams": (1,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "regex": (),
    "stop_regex": ([],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}
# What other servers call fields of ours.
_OURS = {
    "max_completion_tokens": "max_tokens",  # of chats
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "temp": "temperature",
    "top_logprobs": "logprobs",  # of chats
}
_NEAR = 0.81  # max_tokns is so near to max_tokens, best_of is not to bad_words


class GenerationBody(WireModel):
    """Fields that completions and chat completions share. None means the default.

    `unsupported` fields are refused unless they hold one of the values that change nothing.
    """

    model_config = ConfigDict(extra="allow")  # so that the unsupported ones are seen
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = _CHANGES_THE_ANSWER

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MAX_TOKEN_IDS
    )
    seed: int | None = Field(None, ge=-_MAX_INT64 - 1, le=_MAX_INT64)
    n: int | None = Field(None, ge=1, le=128)
    min_tokens: int | None = Field(None, ge=0)
    stop: StopStrings | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_TOKEN_IDS)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: Speculation | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _check_common(self) -> GenerationBody:
        extra = self.model_extra or {}
        if len(extra) > _MOST_EXTRA:  # each is compared with all there are
            raise bad_request(f"there are {len(extra)} fields that this server does not know")
        for name, value in extra.items():
            if value is None:
                continue
            if name in self.unsupported:
                if value not in self.unsupported[name]:
                    raise bad_request(f"`{name}` is not supported", name, "unsupported_parameter")
            elif meant := self._meant(name):
                raise bad_request(f"there is no `{name}`; did you mean `{meant}`?", name)
        if self.stream_options is not None and not self.stream:
            raise bad_request("`stream_options` needs `stream` to be true", "stream_options")
        return self

    @classmethod
    def _meant(cls, name: str) -> str | None:
        """The field that an unknown one is a slip of. Others are no concern of ours: clients send their own."""
        written = name.replace("-", "_")
        near = difflib.get_close_matches(written[:64], cls.model_fields, 1, _NEAR)
        return _OURS.get(written) or (near[0] if near else None)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def speculation_params(self, algorithms: Sequence[str]) -> SpeculationParams:
        """Raises ApiError for an algorithm that is not among those that the server offers."""
        if self.speculation is None:
            return SpeculationParams()
        wanted = self.speculation.algorithm
        if wanted is not None and wanted not in algorithms:
            runs = " and ".join(repr(algorithm) for algorithm in algorithms)
            raise bad_request(
                f"this server runs {runs}, not {wanted!r}: what it runs is set by --speculative-algorithm",
                "speculation.algorithm",
            )
        return SpeculationParams(algorithm=wanted, num_draft_tokens=self.speculation.num_draft_tokens)

    def sampling_params(
        self, *, max_tokens: int, vocab_size: int, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """As the engine takes them. Raises ApiError for what only the model's vocabulary can tell."""
        min_tokens = self.min_tokens or 0
        if min_tokens > max_tokens:
            raise bad_request(
                f"`min_tokens` ({min_tokens}) exceeds the {max_tokens} of `max_tokens`", "min_tokens"
            )
        for param, ids in (
            ("logit_bias", self.logit_bias or {}),
            ("stop_token_ids", self.stop_token_ids or ()),
        ):
            if unknown := next((token for token in ids if token >= vocab_size), None):
                raise bad_request(f"token id {unknown} is not in the vocabulary of {vocab_size}", param)
        chosen = {
            name: value
            for name in _PASSED_ON
            if (value := getattr(self, name)) is not None  # null is the default, as for OpenAI
        }
        return SamplingParams(
            max_tokens=max_tokens,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **chosen,
        )


_PASSED_ON = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


class CompletionBody(GenerationBody):
    """POST /v1/completions. `prompt` holds one entry for each prompt."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {**_CHANGES_THE_ANSWER, "suffix": ("",)}

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(_check_prompts)]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> CompletionBody:
        if len(self.prompt) * (self.n or 1) > MAX_CHOICES:
            raise bad_request(f"prompts times `n` may be at most {MAX_CHOICES}", "prompt")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request(
                "`best_of` is supported only where it equals `n`", "best_of", "unsupported_parameter"
            )
        _check_response_format(self.response_format)
        return self


class ToolCallFunction(WireModel):
    """What an assistant message called. `arguments` is a JSON text."""

    name: str
    arguments: str | None = None


class ToolCall(WireModel):
    """A call that an assistant message made."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: ToolCallFunction


class Message(WireModel):
    """One turn. `content` is a string once parsed, whichever form it came in."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_join_text_parts)] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, fail_fast=True)
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _needs_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a {self.role} message needs `content`")
        return self


class ToolFunction(WireModel):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(WireModel):
    """A tool as the template shows it to the model."""

    type: Literal["function"]
    function: ToolFunction


class TemplateFields(WireModel):
    """What decides how messages become a prompt."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    tools: list[Tool] | None = Field(None, fail_fast=True)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_template(self) -> TemplateFields:
        if self.continue_final_message and self.add_generation_prompt is not False:
            raise bad_request(
                "`continue_final_message` needs `add_generation_prompt` to be false", "continue_final_message"
            )
        reserved = {
            "self",
            "messages",
            "tools",
            "add_generation_prompt",
            "continue_final_message",
            "chat_template",
        }
        if taken := sorted(reserved.intersection(self.chat_template_kwargs or {})):
            raise bad_request(f"`{taken[0]}` is not a template variable of yours", "chat_template_kwargs")
        return self


class ChatBody(TemplateFields, GenerationBody):
    """POST /v1/chat/completions."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_CHANGES_THE_ANSWER,
        "best_of": (1,),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "web_search_options": (),
    }

    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> ChatBody:
        if self.max_tokens == 0:
            raise bad_request("`max_tokens` must be at least 1", "max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise bad_request("`top_logprobs` needs `logprobs` to be true", "top_logprobs")
        if self.tool_choice not in (None, "none", "auto"):
            raise bad_request(
                "only 'none' and 'auto' are supported for `tool_choice`",
                "tool_choice",
                "unsupported_parameter",
            )
        _check_response_format(self.response_format)
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(TemplateFields):
    """POST /tokenize: a `prompt`, or `messages` to put through the template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] = Field(default_factory=list, fail_fast=True)
    return_token_strs: bool | None = None
    chat_template: str | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeBody:
        if self.chat_template is not None:
            raise bad_request("`chat_template` is not supported", "chat_template", "unsupported_parameter")
        if (self.prompt is None) == (not self.messages):
            raise bad_request("give either `prompt` or `messages`", "prompt")
        return self


class DetokenizeBody(WireModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId] = Field(fail_fast=True)


def _check_response_format(value: dict[str, Any] | None) -> None:
    if value is not None and value.get("type") != "text":
        raise bad_request(
            "only {'type': 'text'} is supported for `response_format`",
            "response_format",
            "unsupported_parameter",
        )


def parse_body(kind: type[ModelT], body: bytes) -> ModelT:
    """JSON bytes to a wire type. Raises ApiError 400 with the field at fault for anything that does not fit."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> ApiError:
    if error.error_count() > _MOST_ERRORS:  # an object for each would be made, to tell of one
        return bad_request(f"the body has {error.error_count()} fields or entries that do not fit")
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    param = ""
    for item in first["loc"]:
        if item == "[key]":  # pydantic's mark of an object's key, which the item before it names
            continue
        param += f"[{item}]" if isinstance(item, int) else f".{item}" if param else item
    message = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]
    if first["type"] == "model_type" and not param:
        message = "the body must be a JSON object"
    return bad_request(f"{param}: {message}" if param else message, param or None)
