"""A server of HTTP that answers as a test says."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Asked(NamedTuple):
    method: str
    path: str
    headers: Message
    body: bytes


class BrokenOff(bytes):
    """A body of which the second half does not come."""


@contextmanager
def answering(answer: Callable[[Asked], tuple[int, bytes]]) -> Iterator[str]:
    """For the time of the block; yields its address. `answer` tells the status and the body, which is JSON."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, content = answer(Asked(self.command, self.path, self.headers, body))
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if isinstance(content, BrokenOff):
                self.close_connection, content = True, content[: len(content) // 2]
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Not among the output of tests."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
