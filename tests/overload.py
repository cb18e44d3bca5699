"""A real server in a process of its own, and many clients that send at the same moment."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
