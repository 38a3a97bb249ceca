"""A client that resets its connection while it is being answered: nobody is left to tell, so nothing is logged."""

from __future__ import annotations

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class QuietDisconnects:
    """Ends the app's call, without an error, where the server cannot send any more."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = False

        async def send_or_leave(message: Message) -> None:
            nonlocal gone
            try:
                await send(message)
            except (OSError, RuntimeError) as error:  # how servers tell that the connection was reset
                gone = True
                raise ClientDisconnect from error

        try:
            await self._app(scope, receive, send_or_leave)
        except Exception:
            if not gone:
                raise
