"""`specops serve` with the bundled pair and a crowd."""

import asyncio
import subprocess
from collections import Counter
from collections.abc import Iterator

import pytest

from bench.serving.load import metric
from tests.overload import crowd, serving, tokens

pytestmark = pytest.mark.e2e
QUEUE = 32
SLOTS = 4
CLIENTS = 200


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    folder = tmp_path_factory.mktemp("served")
    with serving(folder, SPECOPS_SLOTS=str(SLOTS), SPECOPS_QUEUE_SIZE=str(QUEUE)) as served:
        yield served


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
