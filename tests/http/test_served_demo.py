"""`specops serve` with the bundled pair: the documented client, a crowd, deadlines, a signal."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.serving.load import HOST, Ask, metric, once
from tests.overload import PROMPT, crowd, serving, tokens

pytestmark = pytest.mark.e2e
QUEUE = 32
SLOTS = 4
CLIENTS = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    with serving(folder, SPECOPS_SLOTS=str(SLOTS), SPECOPS_QUEUE_SIZE=str(QUEUE)) as served:
        yield served


def test_the_documentations_example_runs(
    server: tuple[int, object], capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    assert 'model="smollm2"' in code  # the default; here is another
    code = code.replace('"smollm2"', '"demo"').replace(":8000/", f":{server[0]}/")
    exec(code, {})  # noqa: S102 - our own documentation
    sent = capsys.readouterr().out
    assert "CompletionUsage(" in sent
    assert "draft_n_accepted" in sent


def test_a_crowd_is_answered_or_refused_and_leaves_nothing_behind(
    server: tuple[int, subprocess.Popen[bytes]],
) -> None:
    port, process = server
    ends = asyncio.run(crowd(port, CLIENTS))
    counts = Counter(end.outcome for end in ends)
    assert set(counts) <= {200, 429, 504}
    assert counts[200] >= SLOTS + QUEUE
    assert counts[429] > 0
    assert all(end.retry_after >= 1 for end in ends if end.status == 429)
    answered = [end for end in ends if end.complete]
    assert {tokens(end) for end in answered} == {24}
    positions = {int(end.headers["x-queue-position"]) for end in answered}
    assert 0 in positions
    assert max(positions) <= QUEUE
    assert all(float(end.headers["x-estimated-wait"]) >= 0 for end in answered)
    for name in ("requests_running", "requests_waiting", "kv_tokens"):
        assert asyncio.run(metric(port, f"specops_{name}")) == 0, name
    assert process.poll() is None


def test_a_request_that_waits_too_long_gets_504(folder: Path) -> None:
    with serving(folder, SPECOPS_SLOTS="1", SPECOPS_REQUEST_TIMEOUT="1") as (port, _):
        ends = asyncio.run(crowd(port, 6, max_tokens=900, drafter="none"))
        statuses = {end.outcome for end in ends}
        assert {504} <= statuses <= {200, 504}  # the first is through in time on a fast machine
        assert asyncio.run(metric(port, "specops_requests_waiting")) == 0


def test_a_signal_lets_a_stream_finish_and_the_process_ends_with_0(folder: Path) -> None:
    with serving(folder) as (port, process):
        end = asyncio.run(_signal_in_the_middle(port, process))
        assert end.endswith(b"data: [DONE]\n\n") or end.endswith(b"data: [DONE]\r\n\r\n")
        assert end.count(b'"text"') > 1
        assert process.wait(60) == 0
        log = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    assert "draining" in [line["message"] for line in log]
    assert [line["finish"] for line in log if line.get("path") == "/v1/completions"] == [["length"]]
    assert PROMPT not in json.dumps(log)


async def _signal_in_the_middle(port: int, process: subprocess.Popen[bytes]) -> bytes:
    """Ask for a stream, send SIGTERM after its first event, read it to its end."""
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
    content = json.dumps(body | {"drafter": "none", "stream": True}).encode()
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(
        b"POST /v1/completions HTTP/1.0\r\nhost: test\r\ncontent-type: application/json\r\n"
        + f"content-length: {len(content)}\r\n\r\n".encode()
        + content
    )
    answer = await reader.readuntil(b"data: ")
    process.send_signal(signal.SIGTERM)
    while True:
        health = await once(port, Ask("/health"))
        if health.status in (0, 503):  # 0: it had drained before we could ask
            break
    answer += await reader.read()
    writer.close()
    return answer
