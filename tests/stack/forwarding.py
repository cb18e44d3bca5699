"""A Codespace's forwarding proxy, as far as a service behind it can tell.

A browser asks for `https://NAME-PORT.app.github.dev`. The proxy ends TLS, keeps that name in `Host`
and `X-Forwarded-Host`, and replaces an `Origin` that is the forwarded address by
`http://localhost:PORT` (`https://` if the port is set to HTTPS); another Origin passes unchanged.
Observed in public reports: symfony/demo issue 1542, mastodon pull request 26400, vercel/chatbot
issue 384.
"""

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.loopback import HOST
from tests.stack.support import succeed, tool

NAME, DOMAIN = "octocat-literate-space-parakeet-mld5", "app.github.dev"
ENVIRONMENT = {"CODESPACE_NAME": NAME, "GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN": DOMAIN}
_PIECE = 1 << 16


@dataclass(frozen=True)
class Forwarded:
    """A service's port as a Codespace forwards it.

    Attributes:
        port: of the service, on this machine.
        entrance: port at which the proxy listens, on this machine.
        local: the origin that the service gets to see.
    """

    port: int
    entrance: int
    local: str

    @property
    def host(self) -> str:
        return f"{NAME}-{self.port}.{DOMAIN}"

    @property
    def url(self) -> str:
        """The address that a browser asks for; `resolver_rules` takes it here."""
        return f"https://{self.host}"

    def rewritten(self, head: bytes) -> bytes:
        """The head of a request, as the service receives it. One request on each connection."""
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        headers = [tuple(map(str.strip, line.split(":", 1))) for line in lines]
        upgrades = any(name.lower() == "upgrade" for name, _ in headers)
        kept = [
            (name, self.local if name.lower() == "origin" and value == self.url else value)
            for name, value in headers
            if upgrades or name.lower() != "connection"
        ]
        kept += [("X-Forwarded-Host", self.host), ("X-Forwarded-Proto", "https")]
        if not upgrades:
            kept.append(("Connection", "close"))
        return "\r\n".join([first, *map(": ".join, kept), "", ""]).encode("latin-1")


def resolver_rules(*ports: Forwarded) -> str:
    """Chromium's option that takes the public names to the proxies on this machine."""
    rules = ",".join(f"MAP {port.host}:443 {HOST}:{port.entrance}" for port in ports)
    return f"--host-resolver-rules={rules}"


@contextmanager
def forwarded(port: int, folder: Path, scheme: str = "http") -> Iterator[Forwarded]:
    """Forward a port of this machine as a Codespace does; skips without openssl for the TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(_certificate(folder))
    entrance = socket.create_server((HOST, 0))
    way = Forwarded(port, entrance.getsockname()[1], f"{scheme}://localhost:{port}")
    ended = asyncio.Event()

    async def serve() -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError, asyncio.IncompleteReadError):  # either side may leave
                await _forward(way, reader, writer)
            writer.close()

        async with await asyncio.start_server(accept, sock=entrance, ssl=context):
            await ended.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    # The calling thread may have a loop of its own: that of a browser's driver.
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        yield way
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


async def _forward(
    way: Forwarded, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Pass one request on, and what comes back until the service ends the connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    from_service, to_service = await asyncio.open_connection(HOST, way.port)
    try:
        to_service.write(way.rewritten(head))
        sending = asyncio.create_task(_copy(reader, to_service))
        await _copy(from_service, writer)
        sending.cancel()
    finally:
        to_service.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()


def _certificate(folder: Path) -> Path:
    """A key and its own certificate, in one file; browsers are told not to check it."""
    if tool("openssl") is None:
        pytest.skip("NOTHING WAS FORWARDED: no openssl here")
    file = folder / "forwarding.pem"
    if not file.exists():
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
        written = ("-keyout", file, "-out", f"{file}.crt")
        command = ("openssl", "req", "-x509", *curve, "-nodes", "-days", "2")
        succeed(*command, "-subj", f"/CN={DOMAIN}", *written)
        with file.open("a") as both:
            both.write(Path(f"{file}.crt").read_text())
    return file
