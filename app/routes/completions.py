"""POST /v1/completions: text in, text out, with echo, log-probabilities, several prompts and choices."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from app.answers import Completion, CompletionChoice, CompletionLogprobs
from app.deps import ServerDeps, TokenizerPort
from app.generation import Burst, Generator, collect
from app.logprobs import CompletionLogprobWriter, join_logprobs, num_logprobs
from app.protocol import DEFAULT_COMPLETION_TOKENS, CompletionBody
from app.routes.requests import api_route, json_response, read_body
from app.sse import EventStream, event
from app.tokenizing import encode_prompts, off_loop, resolve_max_tokens
from engine.request import OutputEvent


@dataclass(slots=True)
class _ChoiceWriter:
    """Turns the events of one choice into pieces of text and log-probabilities, the echoed prompt first."""

    index: int
    prompt_ids: list[int]
    echo: str | None  # the prompt's text until it is written
    logprobs: CompletionLogprobWriter | None

    def write(self, output: OutputEvent) -> CompletionChoice:
        text, writer = output.text, self.logprobs
        parts: list[CompletionLogprobs] = []
        if self.echo is not None:
            text = self.echo + text
            if writer is not None and output.prompt_logprobs is not None:
                prompt = zip(self.prompt_ids, output.prompt_logprobs, strict=False)
                parts.append(writer.write_prompt(prompt, self.echo))
            self.echo = None
        if writer is not None:
            parts.append(writer.write((entry.token_id, entry) for entry in output.logprobs))
        logprobs = join_logprobs(parts) if parts else None
        return CompletionChoice(self.index, text, logprobs, output.finish_reason, output.stop_reason)


def completion_routes(deps: ServerDeps, generator: Generator) -> list[BaseRoute]:
    """The completions route."""

    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionBody, deps)
        tokenizer = deps.tokenizer()
        speculation = body.speculation_params(deps.speculative_algorithms)
        prompts = await encode_prompts(tokenizer, body.prompt, body.add_special_tokens is not False)
        max_tokens = max(
            resolve_max_tokens(
                body.max_tokens,
                DEFAULT_COMPLETION_TOKENS,
                len(prompt),
                deps.max_context_len(),
                ("prompt", "max_tokens"),
            )
            for prompt in prompts
        )
        sampling = body.sampling_params(
            max_tokens=max_tokens,
            vocab_size=tokenizer.vocab_size,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        n = body.n or 1
        echoes: list[str] | list[None] = [None] * len(prompts)
        if body.echo:
            echoes = await off_loop(
                lambda: [_prompt_text(tokenizer, prompt) for prompt in body.prompt], sum(map(len, prompts))
            )
        writers = [
            _ChoiceWriter(
                i * n + j,
                ids,
                echoes[i],
                CompletionLogprobWriter(tokenizer, body.skip_special_tokens is not False, ids)
                if body.logprobs is not None
                else None,
            )
            for i, ids in enumerate(prompts)
            for j in range(n)
        ]
        api_id, created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        generation = generator.start(api_id, prompts, n, sampling, speculation)

        def answer(choices: list[CompletionChoice]) -> Completion:
            usage = None if body.include_usage else UNSET
            return Completion(api_id, created, deps.served_model_name, choices, usage=usage)

        def written(burst: Burst) -> bytes:
            pieces = [writers[index].write(output) for index, output in burst]
            return b"".join(event(answer([piece])) for piece in pieces if _says_something(piece))

        async def chunks() -> AsyncIterator[bytes]:
            async for burst in generation.bursts(deps.stream_interval):
                size = num_logprobs(output for _, output in burst)
                if data := await off_loop(partial(written, burst), size):
                    yield data
            if body.include_usage:
                last = answer([])
                last.usage = generation.usage()
                yield event(last)

        if body.stream:
            return EventStream(generation, chunks())
        outputs = await collect(generation, request.receive)

        def whole() -> Response:
            completion = answer(
                [writer.write(output) for writer, output in zip(writers, outputs, strict=True)]
            )
            completion.usage = generation.usage()
            return json_response(completion)

        return await off_loop(whole, num_logprobs(outputs))

    return [api_route("/v1/completions", completions, deps)]


def _prompt_text(tokenizer: TokenizerPort, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False)


def _says_something(piece: CompletionChoice) -> bool:
    has_logprobs = piece.logprobs is not None and bool(piece.logprobs.tokens)
    return bool(piece.text) or has_logprobs or piece.finish_reason is not None
