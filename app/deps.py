"""What the HTTP surface needs of the rest of the server, as interfaces: the routes are built from these alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from engine.request import Request

if TYPE_CHECKING:
    from engine.engine import EngineStats


class EnginePort(Protocol):
    """The decode loop, seen from the event loop. All methods are thread-safe and return at once."""

    def submit(self, *requests: Request) -> None:
        """Queue all or none. Raises QueueFull, EngineStopped or InvalidRequest."""

    def abort(self, request_id: str) -> None:
        """Drop a request and free its slots within a step. Unknown ids are ignored."""

    def stats(self) -> EngineStats:
        """Counters and gauges as of now."""


class TokenizerPort(Protocol):
    """Text to token ids and back, and the model's chat template."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def special_token_ids(self) -> frozenset[int]: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def takes_tools(self) -> bool:
        """Whether the template has a place for tools."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """Raises ValueError where the template refuses the messages."""


class StatusPort(Protocol):
    """Where the server is in its life."""

    @property
    def stage(self) -> str: ...
    @property
    def ready(self) -> bool: ...
    @property
    def error(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class ServerDeps:
    """Parts that exist only once the model is loaded are callables, first called after `status.ready`.

    `server_info` answers at every stage. `speculative_algorithms` are those that a request may ask for.
    """

    engine: Callable[[], EnginePort]
    tokenizer: Callable[[], TokenizerPort]
    max_context_len: Callable[[], int]
    status: StatusPort
    server_info: Callable[[], dict[str, Any]]
    served_model_name: str
    speculative_algorithms: Sequence[str] = ("none",)
    max_request_bytes: int = 8 * 1024 * 1024
    stream_interval: int = 1
