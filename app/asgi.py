"""For who deploys ASGI themselves: `uvicorn app.asgi:app`, with settings from the environment (`TANDEM_*`).

uvicorn's own signals are in force then: on SIGTERM it closes its sockets at once, so that no probe sees 503 while
requests in flight finish. `tandem serve` drains while it still listens.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

from starlette.applications import Starlette

from app.application import build, create_app
from app.cli import explain, server_settings
from app.lifecycle import Lifecycle
from app.settings import SettingsError


def _application() -> Starlette:
    try:
        settings = server_settings(os.environ)
        container = build(settings)
    except SettingsError as error:
        sys.exit(explain(error))
    lifecycle = Lifecycle(container.startup(), container.engine)
    return create_app(container, lifecycle, settings, on_failure=_end)


def _end(message: str) -> None:
    logging.getLogger("uvicorn.error").error("%s", message)
    signal.raise_signal(signal.SIGTERM)  # an app has no other way to end its server


app = _application()
