"""Clients that cut, reset, half-close or stall at every byte of every kind of request.

They attack `specops serve` with the demo pair while eight honest clients ask for answers. A finding
is an end of the server, an error or a wrong answer of an honest client, a callback of the server
that failed, a request or a descriptor that is left, or a log of more than a megabyte beside the
lines of requests that came whole and were answered.
"""

import asyncio
import contextlib
import json
import math
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.serving.load import Ask, metric, once
from specops.system.resources import raise_open_files
from tests.fuzz.cases import FindingError, seeds
from tests.loopback import HOST
from tests.overload import PROMPT, serving

HONEST = 8
WORKERS = 400  # cases at a time, most of which wait for the server's patience to end
MAX_LOG_BYTES = 1_000_000
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset
_PATIENCE = 60.0  # of an honest client, and of the whole for its end
_NEVER = "neither answered nor closed"
_READING = 12.0  # seconds for which a client reads an answer
_STEP = 1_000_003  # a prime: successive seeds visit all cases, far from each other

# -- the requests ----------------------------------------------------------------------------------

_CHAT = {"model": "demo", "messages": [{"role": "user", "content": "def f(x):"}]}
_TEXT = {"model": "demo", "prompt": "def f(x):", "max_tokens": 4}
_BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "def f(x):", "max_new_tokens": 4},
    "/v1/completions": _TEXT,
    "/v1/chat/completions": _CHAT | {"max_tokens": 4},
    "/v1/messages": _CHAT | {"max_tokens": 4},
    "/v1/responses": {"model": "demo", "input": "def f(x):", "max_output_tokens": 4},
    "/api/generate": {"model": "demo", "prompt": "def f(x):", "options": {"num_predict": 4}},
    "/api/chat": _CHAT | {"options": {"num_predict": 4}},
}
_OTHERS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"model": "demo", "input": "def"},
    "/api/embed": {"model": "demo", "input": "def"},
    "/api/show": {"model": "demo"},
    "/tokenize": {"content": "def"},
    "/v1/messages/count_tokens": _CHAT,
}
_READS = ("/", "/v1/models", "/health", "/metrics", "/docs", "/console/figures", "/nothing")


def _head(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: localhost", *lines, "", ""]).encode()


def _post(path: str, body: dict[str, Any], *lines: str) -> bytes:
    content = json.dumps(body).encode()
    length = f"content-length: {len(content)}"
    return _head("POST", path, "content-type: application/json", length, *lines) + content


def _chunked(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    chunks = (content[at : at + 20] for at in range(0, len(content), 20))
    head = _head("POST", path, "content-type: application/json", "transfer-encoding: chunked")
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in chunks) + b"0\r\n\r\n"


def requests() -> dict[str, bytes]:
    """Return every kind of request, by a name."""
    made = {path: _post(path, body) for path, body in (_BODIES | _OTHERS).items()}
    made |= {
        f"{path} stream": _post(path, body | {"stream": True}) for path, body in _BODIES.items()
    }
    made |= {f"GET {path}": _head("GET", path) for path in _READS}
    first = _post("/v1/completions", _TEXT)
    key = "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="
    return made | {
        "chunked": _chunked("/v1/completions", _TEXT),
        "chunked stream": _chunked("/v1/completions", _TEXT | {"stream": True}),
        "expects": _post("/v1/completions", _TEXT, "expect: 100-continue"),
        "pipelined": first + _head("GET", "/v1/models") + first,
        "pipelined streams": 3 * _post("/v1/completions", _TEXT | {"stream": True}),
        "closes": _post("/v1/completions", _TEXT, "connection: close"),
        "unframed": _post("/v1/completions", _TEXT | {"stream": True}, "x-specops-unframed: 1"),
        "websocket": _head(
            "GET", "/v1/models", "connection: upgrade", "upgrade: websocket", key,
            "sec-websocket-version: 13",
        ) + b"\x81\x85\x00\x00\x00\x00hello",
        "h2c": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
        "upgrade h2c": _head("GET", "/", "connection: upgrade, http2-settings", "upgrade: h2c"),
        "tls": bytes.fromhex("16030100c8010000c40303") + bytes(range(60)),
        "old": b"GET /v1/models HTTP/1.0\r\n\r\n",
        "head": _head("HEAD", "/health"),
        "preflight": _head(
            "OPTIONS", "/v1/chat/completions", "origin: http://localhost:5173",
            "access-control-request-method: POST",
        ),
        "no key": _head("POST", "/v1/chat/completions", "authorization: Bearer none"),
        "many headers": _head("GET", "/health", *(f"x-h{n}: {'v' * 20}" for n in range(40))),
        "two lengths": _head("POST", "/generate", "content-length: 1", "content-length: 2"),
        "wrong chunk": _head("POST", "/generate", "transfer-encoding: chunked") + b"xyz\r\n",
        "no host": b"GET / HTTP/1.1\r\n\r\n",
        "strange host": b"GET /v1/models HTTP/1.1\r\nhost: rebind.example.com\r\n\r\n",
        "nonsense": b"\x00\xff\r\n\r\n\r\n" * 4,
        # More than the system's buffers hold, for a client that does not read.
        "pages": 16 * _head("GET", "/", "accept: text/html"),
    }  # fmt: skip


# Sent as one piece before the cut, since their bytes are all alike.
_HUGE = {
    "huge headers": _head("GET", "/health", f"x-huge: {'h' * 60_000}"),
    "too huge headers": _head("GET", "/health", f"x-huge: {'h' * 80_000}"),
    "huge body": _post("/v1/completions", _TEXT | {"prompt": "p" * 300_000}),
    "too huge body": _post("/v1/completions", _TEXT | {"prompt": "p" * 1_100_000}),
}


# -- one case --------------------------------------------------------------------------------------


def _reset(own: socket.socket) -> None:
    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


async def _answered(own: socket.socket, most: int) -> bytes:
    """Read something; the server answers every client in time, or closes the connection."""
    async with asyncio.timeout(_PATIENCE):
        return await asyncio.get_running_loop().sock_recv(own, most)


async def _drained(own: socket.socket) -> None:
    """Read until the server closes, and no longer than a while after it has answered."""
    if await _answered(own, 1 << 16):
        with contextlib.suppress(TimeoutError):  # an idle connection may stay for longer
            async with asyncio.timeout(_READING):
                while await asyncio.get_running_loop().sock_recv(own, 1 << 16):
                    pass


async def _closes(_: socket.socket, __: random.Random) -> None:
    """Close; what the server has sent is not read."""


async def _resets(own: socket.socket, _: random.Random) -> None:
    _reset(own)


async def _resets_later(own: socket.socket, chance: random.Random) -> None:
    """Reset while the server works at the request, or at its refusal."""
    await asyncio.sleep(chance.expovariate(20))
    _reset(own)


async def _resets_at_first_bytes(own: socket.socket, chance: random.Random) -> None:
    """Reset at the first bytes of the answer, or of the 408."""
    _reset(own)  # also if the server closes without a word
    await _answered(own, chance.choice((1, 1, 20, 2000)))


async def _half_closes(own: socket.socket, _: random.Random) -> None:
    own.shutdown(socket.SHUT_WR)
    await _drained(own)


async def _stalls(own: socket.socket, _: random.Random) -> None:
    """Send no more, and read what comes."""
    await _drained(own)


async def _goes_deaf(own: socket.socket, chance: random.Random) -> None:
    """Neither send nor read for a while, which may be longer than the server waits for that."""
    await asyncio.sleep(chance.uniform(0, 18 if chance.random() < 0.1 else 8))
    _reset(own)


WAYS: tuple[Callable[[socket.socket, random.Random], Any], ...] = (
    *(_closes, _resets, _resets_later, _resets_at_first_bytes, _half_closes, _stalls, _goes_deaf),
)


class Attack:
    """All cases, each with a number; the number is a seed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._requests = requests()
        # Name, position of the cut, way.
        self._cases = [
            (name, position, way)
            for name, content in self._requests.items()
            for position in range(len(content) + 1)
            for way in WAYS
        ]
        self._cases += [
            (name, len(content) - back, way)
            for name, content in _HUGE.items()
            for back in (0, 1, 2, 3, len(content) // 2, len(content) - 100)
            for way in WAYS
        ]
        self._requests |= _HUGE
        assert math.gcd(_STEP, len(self._cases)) == 1
        self.ended: Counter[str] = Counter()

    @property
    def number(self) -> int:
        """The number of cases."""
        return len(self._cases)

    async def run(self, seed: int) -> None:
        """Attack once."""
        name, position, way = self._cases[seed * _STEP % self.number]
        chance = random.Random(seed)
        loop = asyncio.get_running_loop()
        with socket.socket() as own:
            own.setblocking(False)
            if way is _goes_deaf:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            try:
                await loop.sock_connect(own, (HOST, self._port))
                for part in _parts(self._requests[name][:position], chance):
                    await loop.sock_sendall(own, part)
                    await asyncio.sleep(0)
                await way(own, chance)
            except TimeoutError:  # an OSError, too
                self.ended[_NEVER] += 1
                print(f"never answered: {name} up to {position}, {way.__name__}", file=sys.stderr)
            except OSError as error:  # the server has refused, and closed first
                self.ended[type(error).__name__] += 1
            else:
                self.ended[way.__name__.strip("_").replace("_", " ")] += 1


def _parts(content: bytes, chance: random.Random) -> Iterator[bytes]:
    """Cut bytes into packets: one, or several of random sizes."""
    if chance.random() < 0.7:
        yield content
        return
    at = 0
    while at < len(content):
        size = 1 + int(chance.expovariate(1 / (1 + len(content) / 6)))
        yield content[at : at + size]
        at += size


# -- honest clients --------------------------------------------------------------------------------


@dataclass
class Honest:
    """Clients that do nothing wrong, and what they got.

    Attributes:
        seconds: of each answer.
        wrong: answers that are not as they should be.
    """

    port: int
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    async def expected(self) -> list[bytes]:
        """Return the bodies of right answers, asked before the attack."""
        return [await self._text(request) for request in _ASKED]

    async def run(self, number: int, right: list[bytes], over: asyncio.Event) -> None:
        """Ask again and again, on connections that stay open for some requests."""
        turn = number
        while not over.is_set():
            kind = turn % len(_ASKED)
            began = time.monotonic()
            try:
                text = await self._text(_ASKED[kind])
            except (TimeoutError, ValueError) as error:
                self.wrong.append(repr(error))
            else:
                if text != right[kind]:
                    self.wrong.append(f"{text[:200]!r} instead of {right[kind][:200]!r}")
            self.seconds.append(time.monotonic() - began)
            turn += 1

    async def _text(self, request: tuple[str, dict[str, Any]]) -> bytes:
        """Return the text of an answer; of a stream, its pieces one behind the other."""
        async with asyncio.timeout(_PATIENCE):
            answer = await once(self.port, Ask(*request))
        if not answer.complete:
            raise ValueError(f"{answer.status} {answer.problem} {answer.body[-200:]!r}")
        return "".join(event["choices"][0]["text"] for event in answer.events).encode()


_LONG = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
_ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", _LONG),
    ("/v1/completions", _LONG | {"stream": True}),
    ("/v1/completions", _LONG | {"prompt": "class A:\n    def"}),
)


@asynccontextmanager
async def honest_clients(port: int) -> AsyncIterator[Honest]:
    """Let honest clients ask as long as the block runs."""
    honest = Honest(port)
    right = await honest.expected()
    over = asyncio.Event()
    clients = [asyncio.create_task(honest.run(n, right, over)) for n in range(HONEST)]
    try:
        yield honest
    finally:
        over.set()
        await asyncio.gather(*clients)


# -- the whole -------------------------------------------------------------------------------------


async def _cases(port: int, cases: int, seconds: float, first: int) -> str:
    """Run cases; return what was done."""
    attack = Attack(port)
    chosen = seeds(cases, seconds, first)

    async def work() -> None:
        for seed in chosen:
            await attack.run(seed)

    async with honest_clients(port) as honest:
        await asyncio.gather(*(work() for _ in range(WORKERS)))
    _judge(honest)
    if stuck := attack.ended[_NEVER]:
        raise FindingError(f"{stuck} connections were neither answered nor closed")
    done = attack.ended.total()
    share = f"{min(1.0, done / attack.number):.0%} of all {attack.number:,}"
    ends = ", ".join(f"{count:,} {name}" for name, count in attack.ended.most_common())
    return f"{done:,} cases, {share} ({ends}); {_described(honest)}"


def _described(honest: Honest) -> str:
    times = sorted(honest.seconds)
    middle, last = times[len(times) // 2], times[-1]
    return (
        f"{len(times):,} honest answers, all right, "
        f"median {middle * 1000:.0f} ms, longest {last * 1000:.0f} ms"
    )


def _judge(honest: Honest) -> None:
    if honest.wrong:
        kinds = Counter(honest.wrong).most_common(3)
        raise FindingError(f"{len(honest.wrong)} answers of honest clients were wrong: {kinds}")


async def _after(port: int, process: subprocess.Popen[bytes], descriptors: int) -> None:
    """Check that nothing is left.

    Raises:
        FindingError: something is.
    """
    end = time.monotonic() + _PATIENCE
    left = "?"
    while left:
        if process.poll() is not None:
            raise FindingError(f"the server ended with {process.returncode}")
        if time.monotonic() > end:
            raise FindingError(f"left after {_PATIENCE:.0f} s: {left}")
        await asyncio.sleep(0.2)
        taken = [await metric(port, f"specops_requests_{name}") for name in ("running", "waiting")]
        more = _descriptors(process) - descriptors
        left = f"{taken} requests, {more} descriptors" if any(taken) or more > 0 else ""
    page = (await once(port, Ask("/metrics"))).body
    failed = re.findall(rb'specops_callback_failures_total{where="(\w+)"} (\S+)', page)
    if any(float(number) for _, number in failed):
        raise FindingError(f"callbacks have failed: {failed}")


def _descriptors(process: subprocess.Popen[bytes]) -> int:
    return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))


def _check_log(log: Path) -> str:
    """Return the sizes of the log.

    Raises:
        FindingError: it is too large, or it tells of a failure.
    """
    lines = log.read_bytes().splitlines(keepends=True)
    # A line of a request that was refused or never whole says how many like it were left out.
    others = [
        line for line in lines if b'"message": "request"' not in line or b'"left_out"' in line
    ]
    size, whole = sum(map(len, others)), sum(map(len, lines))
    if size > MAX_LOG_BYTES:
        raise FindingError(f"the log has {size:,} bytes beside its lines of answers")
    if failed := [line for line in others if b'"exception"' in line]:
        raise FindingError(f"the log tells of {len(failed)} failures: {failed[0].decode()}")
    return f"log {size:,} bytes, with a line for each answer {whole:,}"


def run(cases: int, seconds: float, seed: int) -> str:
    """Attack a server; return what was done.

    Raises:
        FindingError: the server, or an honest client, was hurt.
    """
    raise_open_files(4 * WORKERS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Requests that the attack sends whole wait in the queue, and honest ones behind them.
        with serving(folder, SPECOPS_QUEUE_SIZE="10000") as (port, process):
            try:
                descriptors = _descriptors(process)
                line = asyncio.run(_cases(port, cases, seconds, seed))
                asyncio.run(_after(port, process, descriptors))
                process.send_signal(signal.SIGTERM)
                if status := process.wait(_PATIENCE):
                    raise FindingError(f"the server ended with {status} at SIGTERM")
                return f"{line}; {_check_log(folder / 'log')}"
            except (FindingError, OSError, ValueError) as finding:
                alive = process.poll()
                state = "it serves" if alive is None else f"the server ended with {alive}"
                told = (folder / "log").read_text("utf-8")[-2000:]
                raise FindingError(f"seed {seed}: {finding!r}; {state}\n{told}") from finding
