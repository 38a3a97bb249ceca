"""From chat messages to a prompt: what the template gets to see, and its errors as the client's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from anyio import to_thread

from app.deps import TokenizerPort
from app.errors import bad_request
from app.protocol import Message, TemplateFields


def template_messages(messages: Sequence[Message], template: str | None) -> list[dict[str, Any]]:
    """Messages as templates expect them: call arguments as objects, `developer` only where the template knows it."""
    knows_developer = template is not None and "developer" in template
    result = []
    for index, message in enumerate(messages):
        turn = message.model_dump(exclude_none=True)
        turn.setdefault("content", "")  # None would be rendered as a word
        if message.role == "developer" and not knows_developer:
            turn["role"] = "system"
        for number, call in enumerate(turn.get("tool_calls", ())):
            where = f"messages[{index}].tool_calls[{number}].function.arguments"
            call["function"]["arguments"] = _arguments(call["function"].get("arguments"), where)
        result.append(turn)
    return result


def _arguments(text: str | None, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise bad_request(f"{where}: must be a JSON object in a string", where)
    return arguments


async def chat_prompt(tokenizer: TokenizerPort, fields: TemplateFields, with_tools: bool = True) -> list[int]:
    """Token ids of the templated messages. Raises ApiError 400 where the template refuses them."""

    tools = [tool.model_dump(exclude_none=True) for tool in fields.tools or ()] if with_tools else []
    if tools and not tokenizer.takes_tools:
        raise bad_request(
            "the model's chat template has no place for tools, so the model would not see them",
            "tools",
            "unsupported_parameter",
        )

    def render() -> list[int]:
        text = tokenizer.apply_chat_template(
            template_messages(fields.messages, tokenizer.chat_template),
            tools=tools or None,
            add_generation_prompt=fields.add_generation_prompt is not False,
            continue_final_message=bool(fields.continue_final_message),
            **(fields.chat_template_kwargs or {}),
        )
        # The template writes the special tokens itself.
        return tokenizer.encode(text, add_special_tokens=bool(fields.add_special_tokens))

    try:
        # A template is a program that came with the model: the event loop does not wait for it.
        return await to_thread.run_sync(render)
    except ValueError as error:
        raise bad_request(str(error), "messages") from error
