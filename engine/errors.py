"""What can go wrong with a request, told apart so that the server can answer with the right status."""

from __future__ import annotations


class InvalidRequest(ValueError):
    """The request itself cannot be served. `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFull(Exception):
    """As many requests wait as may wait. `retry_after` is a guess in seconds."""

    def __init__(self, limit: int, retry_after: int) -> None:
        super().__init__(f"the queue is full: at most {limit} requests may wait (--max-queued-requests)")
        self.retry_after = retry_after


class EngineStopped(Exception):
    """The decode loop is not running: it has not started, is stopping, or has failed."""
