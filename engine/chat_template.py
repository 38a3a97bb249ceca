"""Chat templates: Jinja sources that turn a conversation into a prompt, rendered as transformers renders them.

A template comes with a model, so it is not trusted: it runs in Jinja's immutable sandbox over plain data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]

# Marks where the text of the final message ends. Whether its space survives tells if the template trims.
_CONTINUED = "<|message to continue|> "

_TESTS_CONTENT_FOR_NONE = re.compile(r"""content(['"]\])?\s+is\s+(not\s+)?none\b""", re.IGNORECASE)


class ChatTemplateError(ValueError):
    """A template that cannot be compiled, or that refuses or cannot render a conversation."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's tokens for training; here it only renders."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template. `variables` are what it sees besides the conversation: `bos_token` and the like.
    `free_variables` are all that it reads and does not set first."""

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        self.source = source
        self._tests_for_none = tests_content_for_none(source)
        self._variables = dict(variables or {})
        try:
            environment = _environment()
            parsed = environment.parse(source)
            self._template = environment.from_string(parsed)
            self.free_variables = jinja2.meta.find_undeclared_variables(parsed)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template cannot be compiled: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`. `variables` go to the template, over its own.

        `continue_final_message` leaves the last message open, for the model to go on with.
        ChatTemplateError if the template refuses the conversation or fails on it.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("continue_final_message and add_generation_prompt exclude each other")
        # Templates test for a key, and many print a None as it stands.
        plain = [
            {k: v for k, v in message.items() if v is not None or (k == "content" and self._tests_for_none)}
            for message in messages
        ]
        if continue_final_message:
            plain[-1:] = [_open_ended(plain)]
        values = {
            "documents": None,
            **self._variables,
            **variables,
            "messages": plain,
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(values)
        except Exception as error:  # a template is a program: it can fail in any way on what it was given
            raise ChatTemplateError(f"the chat template failed: {error}") from error
        return _cut_open(text) if continue_final_message else text


def tests_content_for_none(source: str) -> bool:
    """Whether a template asks if a message's content is none, as DeepSeek's tell a call from an answer."""
    return _TESTS_CONTENT_FOR_NONE.search(source) is not None


def _open_ended(messages: Sequence[Message]) -> dict[str, Any]:
    """The final message with a mark behind its text."""
    final = dict(messages[-1]) if messages else {}
    content = final.get("content")
    if isinstance(content, str):
        return {**final, "content": content + _CONTINUED}
    if isinstance(content, list):
        for index in reversed(range(len(content))):
            part = content[index]
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                marked = {**part, "text": part["text"] + _CONTINUED}
                return {**final, "content": [*content[:index], marked, *content[index + 1 :]]}
    raise ChatTemplateError("continue_final_message needs a final message with text")


def _cut_open(text: str) -> str:
    before, mark, after = text.rpartition(_CONTINUED.rstrip())
    if not mark:
        raise ChatTemplateError("continue_final_message: the chat template does not show the final message")
    return before if after.startswith(" ") else before.rstrip()
