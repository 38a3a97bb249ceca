"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from app.chat import chat_prompt
from app.deps import ServerDeps
from app.protocol import DetokenizeBody, TokenizeBody
from app.routes.requests import api_route, json_response, read_body
from app.tokenizing import check_vocabulary, off_loop


class TokenizeAnswer(msgspec.Struct):
    """`token_strs` is null unless asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


def tokenize_routes(deps: ServerDeps) -> list[BaseRoute]:
    """Both need the tokenizer, and so a server that is ready."""

    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeBody, deps)
        tokenizer = deps.tokenizer()
        if body.prompt is None:
            tokens = await chat_prompt(tokenizer, body)
        else:
            text, special = body.prompt, body.add_special_tokens is not False
            tokens = await off_loop(lambda: tokenizer.encode(text, special), len(text))

        def answer() -> Response:
            strings = None
            if body.return_token_strs:
                strings = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]
            return json_response(TokenizeAnswer(len(tokens), deps.max_context_len(), tokens, strings))

        return await off_loop(answer, len(tokens))

    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeBody, deps)
        tokenizer = deps.tokenizer()

        def answer() -> Response:
            check_vocabulary(tokenizer, body.tokens, "tokens")
            # As vLLM: what went in comes out, special tokens included.
            return json_response({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})

        return await off_loop(answer, len(body.tokens))

    return [api_route("/tokenize", tokenize, deps), api_route("/detokenize", detokenize, deps)]
