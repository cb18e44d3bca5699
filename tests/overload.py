"""Many clients of a real server that send at the same moment; it records how each request ends.

`python -m tests.overload --clients 200` prints the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench.serving import server
from bench.serving.load import Answer, Ask, burst

PROMPT = "def __enter__(self):\n    return self\n\ndef __exit__(self, *args):"
ENDPOINTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
    ("/v1/completions", {"prompt": PROMPT}),
)


@contextmanager
def serving(
    folder: Path, port: int | None = None, **variables: str
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Serve the demo pair in a process of its own; yield port and process once it is ready."""
    own = {"SPECOPS_MODEL": "demo", "SPECOPS_CACHE_DIR": str(folder / "cache"), **variables}
    with server.serving(own, port=port, log=folder / "log") as running:
        try:
            yield running.port, running.process
        finally:
            running.process.kill()  # it may have requests, for whose end it would wait


async def crowd(port: int, clients: int, **fields: Any) -> list[Answer]:
    """Connect all clients, then send all requests at once; every second pair streams."""
    return await burst(port, [_ask(index, fields) for index in range(clients)])


def _ask(index: int, fields: dict[str, Any]) -> Ask:
    path, body = ENDPOINTS[index % 2]
    body = {"model": "demo", "max_tokens": 24, "temperature": 0, "ignore_eos": True} | body | fields
    if index // 2 % 2 == 1:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Ask(path, body)


def tokens(answer: Answer) -> int:
    """The number of generated tokens of a complete answer, from its usage."""
    count: int = answer.events[-1]["usage"]["completion_tokens"]
    return count


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


def _described(answers: list[Answer]) -> str:
    """Describe a burst."""
    refused = [answer.first * 1000 for answer in answers if answer.status == 429]
    waits = [
        answer.events[-1]["timings"]["queue_ms"] / 1000 / estimate
        for answer in answers
        if answer.complete and (estimate := float(answer.headers["x-estimated-wait"]))
    ]
    text = str(dict(sorted(Counter(answer.outcome for answer in answers).items())))
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
            seen = _described(asyncio.run(crowd(port, options.clients)))
            print(f"burst {number + 1}: {seen}, {resident_bytes(process) / 1e6:.1f} MB")
        process.send_signal(signal.SIGTERM)
        print("exit code", process.wait(60))
        if refused := served_seconds(Path(folder) / "log", 429):
            print(f"the server's own part of a 429: {median(refused) * 1000:.1f} ms (median)")


if __name__ == "__main__":
    _main()
