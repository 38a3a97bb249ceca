"""POST /v1/chat/completions: messages in, an assistant message out."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from functools import partial

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from app.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Usage,
)
from app.chat import chat_prompt
from app.deps import ServerDeps
from app.generation import Burst, Generator, collect
from app.logprobs import chat_logprobs, num_logprobs
from app.protocol import ChatBody
from app.routes.requests import api_route, json_response, read_body
from app.sse import EventStream, event
from app.tokenizing import off_loop, resolve_max_tokens
from engine.request import OutputEvent


def chat_routes(deps: ServerDeps, generator: Generator) -> list[BaseRoute]:
    """The chat completions route."""

    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, ChatBody, deps)
        tokenizer = deps.tokenizer()
        speculation = body.speculation_params(deps.speculative_algorithms)
        prompt = await chat_prompt(tokenizer, body, with_tools=body.tool_choice != "none")
        renamed = body.max_completion_tokens is not None
        max_tokens = resolve_max_tokens(
            body.max_completion_tokens if renamed else body.max_tokens,
            None,
            len(prompt),
            deps.max_context_len(),
            ("messages", "max_completion_tokens" if renamed else "max_tokens"),
        )
        sampling = body.sampling_params(
            max_tokens=max_tokens, vocab_size=tokenizer.vocab_size, logprobs=body.num_logprobs
        )
        n = body.n or 1
        api_id, created, model = f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), deps.served_model_name
        generation = generator.start(api_id, [prompt], n, sampling, speculation)

        def logprobs(output: OutputEvent) -> ChatLogprobs | None:
            return chat_logprobs(tokenizer, output.logprobs) if body.logprobs else None

        def chunk(choices: list[ChatChunkChoice], usage: Usage | None = None) -> bytes:
            shown = usage if body.include_usage else UNSET
            return event(ChatChunk(api_id, created, model, choices, usage=shown))

        def pieces(index: int, output: OutputEvent) -> bytes:
            data = b""
            if output.text or (body.logprobs and output.logprobs):
                delta = ChatDelta(content=output.text)
                data += chunk([ChatChunkChoice(index, delta, logprobs(output))])
            if output.finish_reason is not None:
                end = ChatChunkChoice(index, ChatDelta(), None, output.finish_reason, output.stop_reason)
                data += chunk([end])
            return data

        def written(burst: Burst) -> bytes:
            return b"".join(pieces(index, output) for index, output in burst)

        async def chunks() -> AsyncIterator[bytes]:
            opening = ChatDelta(role="assistant", content="")
            yield b"".join(chunk([ChatChunkChoice(index, opening)]) for index in range(n))
            async for burst in generation.bursts(deps.stream_interval):
                size = num_logprobs(output for _, output in burst)
                if data := await off_loop(partial(written, burst), size):
                    yield data
            if body.include_usage:
                yield chunk([], generation.usage())

        def choice(index: int, output: OutputEvent) -> ChatChoice:
            message = ChatMessage(output.text)
            return ChatChoice(index, message, logprobs(output), output.finish_reason, output.stop_reason)

        if body.stream:
            return EventStream(generation, chunks())
        outputs = await collect(generation, request.receive)

        def whole() -> Response:
            choices = [choice(index, output) for index, output in enumerate(outputs)]
            return json_response(ChatCompletion(api_id, created, model, choices, generation.usage()))

        return await off_loop(whole, num_logprobs(outputs))

    return [api_route("/v1/chat/completions", chat_completions, deps)]
