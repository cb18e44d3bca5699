"""HTTP servers on the loopback interface, in this process."""

import contextlib
import json
import os
import random
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOST = "127.0.0.1"
PORTS = (12_000, 32_000)  # above what browsers refuse, below what systems hand out to clients
# Each worker of pytest has ports of its own, and hands out none twice: who gets one uses it later.
_WORKERS, _WORKER = 16, int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_given: set[int] = set()
_random = random.SystemRandom()  # Hypothesis seeds the other one


def free_port() -> int:
    """Return a port that no process listens on now, and that the system gives to no client."""
    while True:
        port = _random.randrange(PORTS[0] + _WORKER % _WORKERS, PORTS[1], _WORKERS)
        if port in _given:
            continue
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            _given.add(port)
            return port


class Handler(BaseHTTPRequestHandler):
    """Answers in one piece, on connections that stay open, and logs nothing."""

    protocol_version = "HTTP/1.1"

    def body(self) -> Any:
        """The request's JSON."""
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def reply(self, status: int, content: object, headers: Mapping[str, str] | None = None) -> None:
        """Send bytes as they are, anything else as JSON."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    """Ends with all its threads: `server_close` closes their connections and waits for them."""

    daemon_threads = False
    request_queue_size = 128  # of connections that come at once; beyond, a client waits a second

    def __init__(self, *arguments: Any) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        for connection in self._open.copy():
            with contextlib.suppress(OSError):  # its thread may have closed it
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()

    def handle_error(self, *arguments: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # clients may leave in the middle
            super().handle_error(*arguments)  # type: ignore[arg-type]


class _Server6(_Server):
    address_family = socket.AF_INET6

    def server_bind(self) -> None:
        """Take no IPv4, as uvicorn does not."""
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        super().server_bind()


def can_listen(host: str) -> bool:
    """Whether this machine has an address: some have no IPv6."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.create_server((host, 0), family=family):
        return True
    return False


@contextlib.contextmanager
def listening(handler: type[Handler], host: str = HOST) -> Iterator[int]:
    """Serve with a handler; yield the port.

    At the end the connections are closed, and what the handler still does is waited for.
    """
    with (_Server6 if ":" in host else _Server)((host, 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
