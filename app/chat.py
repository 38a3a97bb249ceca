"""From chat messages to a prompt: what the template gets to see, and its errors as the client's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from anyio import to_thread

from app.deps import TokenizerPort
from app.errors import bad_request
from app.protocol import Message, TemplateFields
from engine.chat_template import ChatTemplateError, tests_content_for_none


def template_messages(
    messages: Sequence[Message], template: str | None, arguments_as_objects: bool = True
) -> list[dict[str, Any]]:
    """Messages as templates expect them: call arguments as objects, `developer` only where the template knows it, no
    content beside calls where the template tells a call by that."""
    knows_developer = template is not None and "developer" in template
    tests_for_none = template is not None and tests_content_for_none(template)
    result = []
    for index, message in enumerate(messages):
        turn = message.model_dump(exclude_none=True)
        calls = turn.pop("tool_calls", None)
        if calls:  # templates test for the key
            turn["tool_calls"] = calls
        if not turn.get("content"):  # None would be rendered as a word
            turn["content"] = None if calls and tests_for_none else ""
        if message.role == "developer" and not knows_developer:
            turn["role"] = "system"
        for number, call in enumerate(calls or ()):
            where = f"messages[{index}].tool_calls[{number}].function.arguments"
            text = (call["function"].get("arguments") or "").strip() or "{}"
            arguments = _arguments(text, where)
            call["function"]["arguments"] = arguments if arguments_as_objects else text
        result.append(turn)
    return result


def _arguments(text: str, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise bad_request(f"{where}: must be a JSON object in a string", where)
    return arguments


async def chat_prompt(tokenizer: TokenizerPort, fields: TemplateFields, with_tools: bool = True) -> list[int]:
    """Token ids of the templated messages. Raises ApiError 400 where the template refuses them."""

    tools = (fields.tools or []) if with_tools else []
    if tools and not tokenizer.takes_tools:
        raise bad_request(
            "the model's chat template has no place for tools, so the model would not see them",
            "tools",
            "unsupported_parameter",
        )

    def template(arguments_as_objects: bool) -> str:
        return tokenizer.apply_chat_template(
            template_messages(fields.messages, tokenizer.chat_template, arguments_as_objects),
            tools=[tool.model_dump(exclude_none=True) for tool in tools] or None,
            add_generation_prompt=fields.add_generation_prompt is not False,
            continue_final_message=bool(fields.continue_final_message),
            **(fields.chat_template_kwargs or {}),
        )

    def render() -> list[int]:
        try:
            text = template(arguments_as_objects=True)
        except ChatTemplateError:
            if not any(message.tool_calls for message in fields.messages):
                raise
            text = template(arguments_as_objects=False)  # some templates append them to a text
        # The template writes the special tokens itself.
        return tokenizer.encode(text, add_special_tokens=bool(fields.add_special_tokens))

    try:
        # A template is a program that came with the model: the event loop does not wait for it.
        return await to_thread.run_sync(render)
    except ValueError as error:
        raise bad_request(str(error), "messages") from error
