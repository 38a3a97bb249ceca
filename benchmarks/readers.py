"""Clients that stream completions and do nothing with them: a server's work for readers, without the work of those.

Started by `decode_profile.py`. Reads one JSON line, {"port", "bodies": [...]}, sends every body as a request of its own
and ends when all answers have: with 1, and the end of the answer, if one of them was no whole stream.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys

_TAIL = 1024  # bytes of an answer that are kept: its last event, or an error whole


def read_all(port: int, bodies: list[dict[str, object]]) -> str | None:
    """The end of the first answer that did not end as it should, or None."""
    selector = selectors.DefaultSelector()
    for body in bodies:
        data = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + data)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, bytearray())
    while selector.get_map():
        for key, _ in selector.select():
            received = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            tail: bytearray = key.data
            tail += received
            if received:
                del tail[:-_TAIL]
                continue
            selector.unregister(key.fileobj)
            if b"data: [DONE]" not in tail:
                return tail.decode(errors="replace")
    return None


if __name__ == "__main__":
    sys.exit(read_all(**json.loads(sys.stdin.readline())))
