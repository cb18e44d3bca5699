"""Many clients of a real server that send at the same moment; it records how each request ends.

`python -m tests.overload --clients 200` prints the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tests.loopback import HOST, free_port
from tests.waiting import answers, wait

START_SECONDS = 120.0
PROMPT = "def __enter__(self):\n    return self\n\ndef __exit__(self, *args):"
ENDPOINTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
    ("/v1/completions", {"prompt": PROMPT}),
)


@dataclass(frozen=True)
class End:
    """How one request ended.

    Attributes:
        status: of HTTP; of a stream that failed later, the status of its error.
        seconds: time from sending to the first byte of the answer.
        headers: by their lower-case names.
        tokens: number of generated tokens, from the usage.
        queue_seconds: time before a slot was free, from the timings.
    """

    status: int
    seconds: float
    headers: dict[str, str]
    tokens: int
    queue_seconds: float


@contextmanager
def serving(
    folder: Path, port: int | None = None, **variables: str
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Serve the demo pair in a process of its own; yield port and process once it is ready."""
    port = port or free_port()
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("SPECOPS_")}
    variables = {"SPECOPS_MODEL": "demo", "SPECOPS_CACHE_DIR": str(folder / "cache"), **variables}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "specops", "serve", "--port", str(port)],
            env=inherited | variables,
            stderr=log,
        )
        try:
            # Without an event loop: a browser's loop may run in the same thread.
            wait("the server is ready", lambda: _is_ready(port, process), START_SECONDS)
            yield port, process
        finally:
            process.kill()
            process.wait()


def _is_ready(port: int, process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        raise AssertionError(f"the server ended with {process.returncode}")
    return answers(f"http://{HOST}:{port}/health")


async def exchange(port: int, head: bytes, body: bytes = b"") -> tuple[bytes, bytes]:
    """Send one request on a connection of its own; return the answer's head and body."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(head + b"connection: close\r\n\r\n" + body)
        answer = await reader.read()
    finally:
        writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    return head, rest


async def crowd(port: int, clients: int, **fields: Any) -> list[End]:
    """Connect all clients, then send all requests at once; every second one streams."""
    connections = [await asyncio.open_connection(HOST, port) for _ in range(clients)]
    ends = (
        _ask(index, reader, writer, fields) for index, (reader, writer) in enumerate(connections)
    )
    return await asyncio.gather(*ends)


async def _ask(
    index: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fields: dict[str, Any]
) -> End:
    path, body = ENDPOINTS[index % 2]
    stream = index // 2 % 2 == 1
    body = {"model": "demo", "max_tokens": 24, "temperature": 0, "ignore_eos": True} | body | fields
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
    )
    started = time.monotonic()
    writer.write(head.encode() + content)
    first = await reader.read(1 << 16)
    seconds = time.monotonic() - started
    answer = first + await reader.read()
    writer.close()
    return _end(answer, seconds)


def _end(answer: bytes, seconds: float) -> End:
    head, _, rest = answer.partition(b"\r\n\r\n")
    line, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    status = int(line.split()[1])
    text = rest.decode()
    if status == 200 and headers["content-type"].startswith("text/event-stream"):
        events = re.findall(r"^data: (.*)$", text.replace("\r\n", "\n"), re.MULTILINE)
        last = json.loads(events[-2] if events[-1] == "[DONE]" else events[-1])
        if "error" in last:
            status = 504 if last["error"]["code"] == "timeout" else 500
        elif events[-1] != "[DONE]":
            status = 0  # it broke off
    else:
        last = json.loads(text)
    tokens = (last.get("usage") or {}).get("completion_tokens", 0)
    waited = (last.get("timings") or {}).get("queue_ms", 0) / 1000
    return End(status, seconds, headers, tokens, waited)


async def gauge(port: int, name: str) -> float:
    """Return the value of a series of the service that has no labels."""
    _, page = await exchange(port, b"GET /metrics HTTP/1.1\r\nhost: test\r\n")
    found = re.search(rf"^specops_{name} (.*)$", page.decode(), re.MULTILINE)
    if found is None:
        raise AssertionError(f"there is no {name}")
    return float(found[1])


def resident_bytes(process: subprocess.Popen[bytes]) -> int:
    """Return the memory of a process that belongs to no file."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return sum(
        int(re.search(rf"{name}:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]
        for name in ("RssAnon", "RssShmem")
    )


def served_seconds(log: Path, status: int) -> list[float]:
    """Return the seconds of all answers with a status, from the server's log."""
    lines = (json.loads(line) for line in log.read_text(encoding="utf-8").splitlines())
    return [line["seconds"] for line in lines if line.get("status") == status]


def _told(ends: list[End]) -> str:
    """Describe a burst."""
    refused = [end.seconds * 1000 for end in ends if end.status == 429]
    waits = [
        end.queue_seconds / float(end.headers["x-estimated-wait"])
        for end in ends
        if end.status == 200 and float(end.headers["x-estimated-wait"])
    ]
    text = str(dict(sorted(Counter(end.status for end in ends).items())))
    if len(refused) > 1:
        text += f", 429 after {median(refused):.1f} ms (median)"
        text += f" and {quantiles(refused, n=20)[-1]:.1f} ms (95 %)"
    if waits:
        text += f", waits of {median(waits):.2f} times the estimate (median)"
    return text


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--bursts", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as (port, process):
        for number in range(options.bursts):
            told = _told(asyncio.run(crowd(port, options.clients)))
            print(f"burst {number + 1}: {told}, {resident_bytes(process) / 1e6:.1f} MB")
        process.send_signal(signal.SIGTERM)
        print("exit code", process.wait(60))
        if refused := served_seconds(Path(folder) / "log", 429):
            print(f"the server's own part of a 429: {median(refused) * 1000:.1f} ms (median)")


if __name__ == "__main__":
    _main()
