"""Stand-ins for what the HTTP surface is built on: a byte-level tokenizer, an engine on a thread, a running server."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import tokenizers
import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp
from tokenizers import decoders, models, pre_tokenizers

from app.deps import ServerDeps
from app.errors import exception_handlers
from app.routes import routes
from engine.chat_template import ChatTemplate
from engine.errors import EngineStopped, InvalidRequest, QueueFull
from engine.request import OutputEvent, Request, SpeculationStats, TokenLogprob

MODEL = "tiny"
CONTEXT_LEN = 256

TEMPLATE = """\
{%- if tools %}[{{ tools | map(attribute='function') | map(attribute='name') | join(',') }}]{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' and not m.tool_call_id %}{{ raise_exception('a tool answers no call') }}{% endif -%}
<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.x }}){% endfor -%}
{%- if not (loop.last and continue_final_message) %}</s>{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<assistant>{% endif -%}{{ mood }}"""


class ByteTokenizer:
    """One token a byte (a real `tokenizers` byte-level model without merges), `</s>` as id 256."""

    def __init__(self, chat_template: str | None = TEMPLATE) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {letter: index for index, letter in enumerate(alphabet)}
        self._tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens(["</s>"])
        self.chat_template = chat_template
        self.vocab_size = self._tokenizer.get_vocab_size()
        # Byte-level letters: printable bytes stand for themselves, the others are numbered from U+0100 on.
        themselves = {ord(letter) for letter in alphabet if ord(letter) < 256}
        others = [byte for byte in range(256) if byte not in themselves]
        self._bytes = [bytes([ord(c) if ord(c) < 256 else others[ord(c) - 256]]) for c in alphabet] + [
            b"</s>"
        ]

    @property
    def special_token_ids(self) -> frozenset[int]:
        return frozenset({256})

    @property
    def takes_tools(self) -> bool:
        return self.chat_template is None or "tools" in self.chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def apply_chat_template(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        if self.chat_template is None:
            raise ValueError("the model has no chat template")
        return ChatTemplate(self.chat_template).render(messages, **variables)


def logprob_of(token_id: int) -> float:
    """What the fake engine reports for a token."""
    return -token_id / 16


@dataclass(frozen=True)
class FakeStats:
    running: int = 3
    waiting: int = 2
    slots_total: int = 100
    slots_free: int = 60
    slots_evictable: int = 30
    slots_protected: int = 10
    prompt_tokens_total: int = 11
    generation_tokens_total: int = 22
    cached_tokens_total: int = 5
    drafted_tokens_total: int = 8
    accepted_tokens_total: int = 6
    verify_steps_total: int = 4
    preemptions_total: int = 1
    requests_finished: dict[str, int] = field(default_factory=lambda: {"stop": 7})
    worker: dict[str, float] = field(default_factory=lambda: {"drafter_accept_length_alarm": 1.0})


@dataclass
class _Live:
    request: Request
    left: deque[int]
    held: bytes = b""
    sent: int = 0


class FakeEngine:
    """Answers every request with `reply` (after `choice` times "+"), one step at a time on a thread of its own.

    `tokens_per_step` tokens make an event; characters are held until whole. `stall_after` tokens each request stops
    progressing until `resume`; `fail` ends each with that error instead of its second event. A step takes
    `step_seconds` at least: without, a stream's reader may find several at once.
    Half the prompt counts as cached, and each step as a verify step unless the request opts out of speculation.
    """

    def __init__(
        self,
        tokenizer: ByteTokenizer,
        reply: str = "Hello, world",
        *,
        tokens_per_step: int = 1,
        max_queued: int = 64,
        stall_after: int | None = None,
        fail: str | None = None,
        end_with: str = "stop",
        step_seconds: float = 0.0,
    ) -> None:
        self.tokenizer = tokenizer
        self.reply = reply
        self.requests: list[Request] = []
        self.aborted: Counter[str] = Counter()
        self.stopped = False
        self._tokens_per_step = tokens_per_step
        self._max_queued = max_queued
        self._stall_after = stall_after
        self._fail = fail
        self._end_with = end_with
        self._step_seconds = step_seconds
        self._changed = threading.Condition()
        self._live: dict[str, _Live] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def submit(self, *requests: Request) -> None:
        with self._changed:
            if self.stopped:
                raise EngineStopped("the engine is not running")
            if len(self._live) + len(requests) > self._max_queued:
                raise QueueFull(self._max_queued, retry_after=7)
            if any(request.sampling.seed == 666 for request in requests):
                raise InvalidRequest("this seed is cursed", param="seed")
            for request in requests:
                tokens = self.tokenizer.encode("+" * request.choice + self.reply)
                self._live[request.request_id] = _Live(request, deque(tokens))
                self.requests.append(request)
            self._changed.notify_all()

    def abort(self, request_id: str) -> None:
        with self._changed:
            if self._live.pop(request_id, None):
                self.aborted[request_id] += 1
            self._changed.notify_all()

    def stats(self) -> FakeStats:
        return FakeStats()

    def resume(self) -> None:
        with self._changed:
            self._stall_after = None
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[FakeEngine], bool], timeout: float = 10) -> bool:
        """True as soon as `condition` holds; looked at whenever anything changes."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self), timeout)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _movable(self) -> list[_Live]:
        limit = self._stall_after
        return [live for live in self._live.values() if limit is None or live.sent < limit]

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._movable())
                if self._closing:
                    return
                for live in self._movable():
                    event = self._step(live)
                    if event.finish_reason is not None:
                        del self._live[live.request.request_id]
                    live.request.sink(event)
                self._changed.notify_all()
            if self._step_seconds:
                time.sleep(self._step_seconds)

    def _step(self, live: _Live) -> OutputEvent:
        request, sampling = live.request, live.request.sampling
        request.admitted_at = request.admitted_at or time.monotonic()
        if self._fail is not None and live.sent:
            return OutputEvent(request.request_id, "", (), finish_reason="error", error=self._fail)
        room = min(self._tokens_per_step, sampling.max_tokens - live.sent)
        tokens = tuple(live.left.popleft() for _ in range(min(room, len(live.left))))
        first, live.sent = live.sent == 0, live.sent + len(tokens)
        live.held += b"".join(map(self.tokenizer.token_bytes, tokens))
        finish: Any = self._end_with if not live.left else None
        if live.left and live.sent == sampling.max_tokens:
            finish = "length"
        text = live.held.decode(errors="replace") if finish or _is_whole(live.held) else ""
        live.held = b"" if text else live.held
        steps = -(-live.sent // self._tokens_per_step) if request.speculation.algorithm != "none" else 0
        return OutputEvent(
            request.request_id,
            text,
            tokens,
            tuple(self._logprob(token, sampling.logprobs) for token in tokens)
            if sampling.logprobs is not None
            else (),
            finish_reason=finish,
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=live.sent,
            cached_tokens=len(request.prompt_ids) // 2,
            prompt_logprobs=self._prompt_logprobs(request) if first else None,
            speculation=SpeculationStats(4 * steps, 3 * steps, steps, 4 * steps) if finish else None,
        )

    def _logprob(self, token: int, top: int) -> TokenLogprob:
        return TokenLogprob(token, logprob_of(token), tuple((t, logprob_of(t)) for t in range(top)))

    def _prompt_logprobs(self, request: Request) -> tuple[TokenLogprob | None, ...] | None:
        top = request.sampling.prompt_logprobs
        if top is None:
            return None
        return (None, *(self._logprob(token, top) for token in request.prompt_ids[1:]))


def _is_whole(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@dataclass
class FakeStatus:
    stage: str = "ready"
    ready: bool = True
    error: str | None = None


def make_app(engine: FakeEngine, status: FakeStatus | None = None, /, **changes: Any) -> Starlette:
    """An app of the real routes over fakes; `changes` are fields of ServerDeps."""
    parts: dict[str, Any] = {
        "engine": lambda: engine,
        "tokenizer": lambda: engine.tokenizer,
        "max_context_len": lambda: CONTEXT_LEN,
        "status": status or FakeStatus(),
        "server_info": lambda: {"version": "9.9", "stage": "ready"},
        "served_model_name": MODEL,
        "speculative_algorithms": ("none", "ngram"),
        "max_request_bytes": 100_000,
    }
    deps = ServerDeps(**{**parts, **changes})
    return Starlette(routes=routes(deps), exception_handlers=exception_handlers)


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Serve `app` on a free port of this machine; gives its base URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def http_server(
    reply: str = "Hello, world", stream_interval: int = 1, **options: Any
) -> Iterator[tuple[httpx.Client, FakeEngine]]:
    """A client of a running server over a fake engine built with `options`, and that engine."""
    engine = FakeEngine(ByteTokenizer(), reply, **options)
    app = make_app(engine, stream_interval=stream_interval)
    with engine, serving(app) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client, engine
