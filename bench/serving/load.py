"""The HTTP client of benchmarks, soaks and tests under load: sends requests, records how they end.

A scenario is data: a list of requests to send at the same moment (`burst`), or one script per
client, which makes the next request from the last answer (`follow`). The client implements HTTP
itself, because some clients send half a request or disconnect midway, and because a client that
shares two cores with the server must use little CPU time.
"""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

HOST = "127.0.0.1"
_SECONDS = 600.0  # for a whole answer
_EVENT, _DONE = b"data: ", b"[DONE]"


class ServerError(ConnectionError):
    """The server did not start, or did not answer; the message says what it reported."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: `POST` with a body, or `GET` without one.

    Attributes:
        path: path of the endpoint.
        body: sent as JSON; bytes are sent unchanged.
        headers: further headers.
        pause: seconds that a script's client waits before sending the request.
    """

    path: str
    body: Mapping[str, Any] | bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    pause: float = 0.0

    def content(self, *, close: bool = False) -> bytes:
        """The request's bytes; `close` asks the server to close the connection afterwards."""
        data = self.body if isinstance(self.body, bytes) else b""
        if isinstance(self.body, Mapping):
            data = json.dumps(self.body).encode()
        headers = {"host": "localhost", **self.headers}
        if self.body is not None:
            headers |= {"content-type": "application/json", "content-length": str(len(data))}
        if close:
            headers["connection"] = "close"
        line = f"{'GET' if self.body is None else 'POST'} {self.path} HTTP/1.1"
        return "\r\n".join([line, *map(": ".join, headers.items()), "", ""]).encode() + data


@dataclass(slots=True)
class Answer:
    """How a request ended.

    Attributes:
        status: HTTP status; 0 if no answer came.
        headers: by name in lower case.
        body: the received part of the body.
        whole: whether the body was received to its end.
        problem: why it was not.
        sent: time of sending, by `time.perf_counter`.
        first: seconds to the answer's head.
        event: seconds to a stream's first event.
        seconds: seconds to its end.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = False
    problem: str = ""
    sent: float = 0.0
    first: float = 0.0
    event: float = 0.0
    seconds: float = 0.0

    @property
    def streamed(self) -> bool:
        """Whether the answer is a stream of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def events(self) -> list[dict[str, Any]]:
        """A stream's events without the end marker; otherwise only the body."""
        if not self.streamed:
            return [json.loads(self.body)]
        lines = (line for line in self.body.splitlines() if line.startswith(_EVENT))
        data = [line.removeprefix(_EVENT).strip() for line in lines]
        return [json.loads(item) for item in data if item != _DONE]

    @property
    def complete(self) -> bool:
        """Whether the answer has status 200 and is complete; a stream ends with a marker."""
        ended = self.body.rstrip().endswith(_EVENT + _DONE) if self.streamed else self.whole
        return self.status == 200 and ended

    def checked(self) -> Self:
        """The answer itself.

        Raises:
            ServerError: it is not complete.
        """
        if not self.complete:
            raise ServerError(f"{self.status} {self.problem} {self.body[-500:]!r}")
        return self

    @property
    def outcome(self) -> int:
        """The status; for a stream that failed after its head, that of the error; 0 if cut off."""
        if self.status != 200 or self.complete:
            return self.status
        error = self.events[-1].get("error") if self.whole and self.events else None
        return 0 if error is None else 504 if error.get("code") == "timeout" else 500

    @property
    def retry_after(self) -> float:
        """The seconds in the header `Retry-After`."""
        return float(self.headers["retry-after"])


class Connection:
    """A connection that stays open between requests, unless the server closes it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open the connection; `send` does so if necessary."""
        await self.close()
        self._streams = await asyncio.open_connection(HOST, self.port)
        return self._streams

    async def close(self) -> None:
        """Close the connection."""
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()
            with suppress(OSError):
                await streams[1].wait_closed()

    async def send(self, content: Ask | bytes, leaves: int | None = None) -> Answer:
        """Send a request and read the answer.

        Args:
            content: the request, or bytes to send unchanged.
            leaves: number of lines of the body after which the client disconnects; 0: before the
                answer; None: it reads the whole answer.
        """
        answer = Answer(sent=time.perf_counter())
        try:
            async with asyncio.timeout(_SECONDS):
                streams = self._streams
                if streams is None or streams[0].at_eof():
                    streams = await self.connect()
                reader, writer = streams
                answer.sent = time.perf_counter()
                writer.write(content.content() if isinstance(content, Ask) else content)
                await writer.drain()
                if leaves != 0:
                    await _read(reader, answer, leaves)
        except (OSError, EOFError) as error:
            answer.problem = repr(error)
        answer.seconds = time.perf_counter() - answer.sent
        if not answer.whole or answer.headers.get("connection") == "close":
            await self.close()
        return answer


async def _read(reader: asyncio.StreamReader, answer: Answer, leaves: int | None) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    answer.first = time.perf_counter() - answer.sent
    line, *lines = head.decode("latin-1").rstrip().split("\r\n")
    pairs = (header.partition(":") for header in lines)
    answer.headers = {name.lower(): value.strip() for name, _, value in pairs}
    answer.status = int(line.split()[1])
    parts: list[bytes] = []
    try:
        async for part in _parts(reader, answer.headers):
            parts.append(part)
            if not answer.event and part.startswith(_EVENT):
                answer.event = time.perf_counter() - answer.sent
            if leaves is not None and (leaves := leaves - part.count(b"\n")) <= 0:
                return
        answer.whole = True
    finally:
        answer.body = b"".join(parts)


async def _parts(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Yield the body in parts as they arrive."""
    if headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readuntil(b"\r\n"), 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while part := await reader.read(1 << 16):
            yield part


async def once(port: int, content: Ask | bytes, leaves: int | None = None) -> Answer:
    """Send a request on a new connection; see `Connection.send`."""
    connection = Connection(port)
    try:
        raw = content.content(close=True) if isinstance(content, Ask) else content
        return await connection.send(raw, leaves)
    finally:
        await connection.close()


async def burst(port: int, asks: Sequence[Ask]) -> list[Answer]:
    """Connect a client for each request, then send all requests at the same moment."""
    connections = [Connection(port) for _ in asks]
    try:
        for connection in connections:
            await connection.connect()
        contents = (ask.content(close=True) for ask in asks)
        sent = (one.send(content) for one, content in zip(connections, contents, strict=True))
        return await asyncio.gather(*sent)
    finally:
        for connection in connections:
            await connection.close()


def span(answers: Sequence[Answer]) -> float:
    """Seconds from the first request to the last answer's end."""
    end = max(answer.sent + answer.seconds for answer in answers)
    return end - min(answer.sent for answer in answers)


Script = Generator[Ask, Answer, None]
"""A client: it yields its next request and receives the answer."""


async def follow(port: int, script: Script) -> None:
    """Send a script's requests one after the other, on one connection."""
    connection = Connection(port)
    try:
        ask = next(script)
        while True:
            await asyncio.sleep(ask.pause)
            ask = script.send(await connection.send(ask))
    except StopIteration:
        pass
    finally:
        await connection.close()


async def follow_all(port: int, scripts: Iterable[Script]) -> None:
    """Follow scripts concurrently to their ends."""
    await asyncio.gather(*(follow(port, script) for script in scripts))


def greedy(model: str, prompt: str | Sequence[int], output: int, **more: Any) -> Ask:
    """A request for a streamed greedy completion of exactly `output` tokens.

    Args:
        model: name of the model.
        prompt: text or token ids.
        output: number of tokens.
        more: further fields of the body.
    """
    usual = {"temperature": 0, "ignore_eos": True, "stream": True}
    about = {"model": model, "prompt": prompt, "max_tokens": output}
    told = {"stream_options": {"include_usage": True}}
    return Ask("/v1/completions", {**usual, **about, **told, **more})


@contextmanager
def following(port: int, scripts: Iterable[Script]) -> Iterator[None]:
    """Follow scripts in a thread during the block, and wait for their ends afterwards."""
    thread = threading.Thread(target=lambda: asyncio.run(follow_all(port, scripts)))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def figure(page: str, name: str, *labels: str) -> float:
    """The sum of all series on a metrics page with this name and these labels (`name="value"`)."""
    rows = [row for row in page.splitlines() if row.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(row.rpartition(" ")[2]) for row in rows if all(one in row for one in labels))


async def metric(port: int, name: str, path: str = "/metrics") -> float:
    """A server's metric, summed over its labels.

    Raises:
        ServerError: the server does not answer.
        LookupError: it has no metric of this name.
    """
    page = (await once(port, Ask(path))).checked().body.decode()
    if f"\n{name}" not in page:
        raise LookupError(f"the server has no metric {name}")
    return figure(page, name)
