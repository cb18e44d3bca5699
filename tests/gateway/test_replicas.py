"""Which replica is asked, and what happens where one refuses, breaks off, hangs or is gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import httpx
import pytest

from specops.http.errors import ApiError
from specops.http.sse import WHOLE
from tests.gateway.running import Row, row
from tests.stack import queries
from tests.waiting import answers, wait

EJECTIONS = "envoy_cluster_outlier_detection_ejections_enforced_total"
SESSION = {"X-Session-ID": "7"}


@pytest.fixture(scope="module")
def three_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Row]:
    with row(3, tmp_path_factory.mktemp("three")) as running:
        yield running


@pytest.fixture
def three(three_of_all: Row) -> Iterator[Row]:
    """Three replicas that are well and were asked nothing."""
    gateway, fakes = three_of_all.gateway, three_of_all.fakes
    for fake in fakes:
        fake.status, fake.headers, fake.broken, fake.held, fake.streamed = 200, {}, "", None, None
    numbers = count()

    def all_in() -> bool:
        three_of_all.post(headers={"X-Session-ID": f"first {next(numbers)}"})
        return all(fake.asked for fake in fakes)

    wait("all are in", all_in)
    for fake in fakes:
        fake.asked.clear()
        fake.others = 0
    before = gateway.figure(EJECTIONS)
    yield three_of_all
    if any(fake.broken == "before" and fake.asked for fake in fakes):
        wait("the one that broke off is out", lambda: gateway.figure(EJECTIONS) > before)


def asked(three: Row) -> list[int]:
    return [len(fake.asked) for fake in three.fakes]


def test_a_session_stays_with_its_replica(three: Row) -> None:
    for _ in range(9):
        assert three.post(headers=SESSION).status_code == 200
    assert sorted(asked(three)) == [0, 0, 9]


def test_sessions_are_spread_over_all(three: Row) -> None:
    for number in range(60):
        assert three.post(headers={"X-Session-ID": str(number)}).status_code == 200
    assert min(asked(three)) > 5


def test_a_session_that_is_too_busy_for_one_replica_is_bounded(three: Row) -> None:
    release = threading.Event()
    for fake in three.fakes:
        fake.held = release
    with ThreadPoolExecutor(24) as pool:
        running = []
        for number in range(24):  # one after another: what only connects does not count as active
            running.append(pool.submit(three.post, headers=SESSION))
            wait("it is under way", lambda number=number: sum(asked(three)) == number + 1)
        counts = asked(three)
        release.set()
        assert all(future.result().status_code == 200 for future in running)
    assert sorted(counts) == [2, 11, 11]  # 1.25 times the mean, and the one that fills it


def test_whatever_does_not_generate_goes_to_any(three: Row) -> None:
    for _ in range(60):
        assert three.client.get("/v1/models").status_code == 200
    assert min(fake.others for fake in three.fakes) > 5


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_is_tried_elsewhere_at_once(three: Row, status: int) -> None:
    three.post(headers=SESSION)
    (owner,) = (fake for fake in three.fakes if fake.asked)
    owner.status, owner.headers = status, {"Retry-After": "60"}
    answer = three.post(headers=SESSION)
    assert answer.status_code == 200
    assert answer.json()["replica"] != owner.port


@pytest.mark.parametrize("status", [200, 400, 422, 500])
def test_any_other_answer_is_the_answer(three: Row, status: int) -> None:
    for fake in three.fakes:
        fake.status = status
    assert three.post().status_code == status
    assert sum(asked(three)) == 1


@pytest.mark.parametrize("waits", [(9, 4, 7), (4, 9, 7), (7, 9, 4)])
def test_where_all_refuse_the_client_gets_the_shortest_wait(
    three: Row, waits: tuple[int, ...]
) -> None:
    for fake, seconds in zip(three.fakes, waits, strict=True):
        fake.status, fake.headers = 429, {"Retry-After": str(seconds)}
    for number in range(20):
        before = asked(three)
        answer = three.post(headers={"X-Session-ID": str(number), "X-Request-ID": "the-same"})
        assert answer.status_code == 429
        told = [
            seconds
            for seconds, earlier, now in zip(waits, before, asked(three), strict=True)
            if now > earlier
        ]
        assert answer.headers["retry-after"] == str(min(told))
    # All are asked for each, unless a slow machine lets one miss its checks for a moment.
    assert min(asked(three)) >= 15


def test_a_break_before_the_answer_is_tried_elsewhere(three: Row) -> None:
    three.post(headers=SESSION)
    (owner,) = (fake for fake in three.fakes if fake.asked)
    owner.broken = "before"
    assert three.post(headers=SESSION).json()["replica"] != owner.port


def test_nothing_is_tried_again_once_an_answer_has_begun(three: Row) -> None:
    for fake in three.fakes:
        fake.broken = "within"
    with pytest.raises(httpx.RemoteProtocolError):
        three.post()
    assert sum(asked(three)) == 1


EVENTS = b"data: 1\n\ndata: 2\n\n"


@pytest.mark.parametrize("events", [b"", EVENTS, EVENTS * 40_000])
def test_a_stream_that_ends_as_it_should_is_passed_on_as_it_is(three: Row, events: bytes) -> None:
    for fake in three.fakes:
        fake.streamed = events + WHOLE
    answer = three.post(headers={"x-specops-unframed": "0"})
    assert answer.content == events
    assert answer.headers["transfer-encoding"] == "chunked"
    assert "x-specops-unframed" not in answer.headers
    (asked_with,) = (fake.asked[0] for fake in three.fakes if fake.asked)
    assert asked_with["x-specops-unframed"] == "1"


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/messages", "/api/chat"])
@pytest.mark.parametrize("cut", [EVENTS, EVENTS + b"data: 3"])
def test_a_stream_that_breaks_off_ends_with_the_protocols_error(
    three: Row, path: str, cut: bytes
) -> None:
    for fake in three.fakes:
        fake.streamed = cut
    answer = three.post(path=path)
    assert answer.status_code == 200
    told = answer.content.removeprefix(cut)
    message = "the replica that wrote this answer is gone; ask again"
    gone = ApiError(500, message, code="replica_gone")
    assert told == (b"" if cut is EVENTS else b"\n\n") + gone.event(path)
    assert sum(asked(three)) == 1


def test_the_first_break_takes_a_replica_out_and_a_check_brings_it_back(three: Row) -> None:
    before = three.gateway.figure(EJECTIONS)
    three.post(headers=SESSION)
    (owner,) = (fake for fake in three.fakes if fake.asked)
    owner.broken = "before"
    three.post(headers=SESSION)
    wait("it is out", lambda: three.gateway.figure(EJECTIONS) == before + 1)
    owner.broken = ""
    wait("it is back", lambda: three.post(headers=SESSION).json()["replica"] == owner.port)


def test_the_first_503_takes_a_replica_out_and_a_429_does_not(three: Row) -> None:
    before = three.gateway.figure(EJECTIONS)
    three.post(headers=SESSION)
    (owner,) = (fake for fake in three.fakes if fake.asked)
    owner.status = 429
    three.post(headers=SESSION)
    assert three.gateway.figure(EJECTIONS) == before
    owner.status = 503
    three.post(headers=SESSION)
    wait("it is out", lambda: three.gateway.figure(EJECTIONS) == before + 1)


def test_a_replica_that_drains_is_left_alone(three: Row) -> None:
    three.post(headers=SESSION)
    (owner,) = (fake for fake in three.fakes if fake.asked)
    owner.healthy = False
    wait("it is out", lambda: three.post(headers=SESSION).json()["replica"] != owner.port)
    before = len(owner.asked)
    assert three.post(headers=SESSION).json()["replica"] != owner.port
    assert len(owner.asked) == before
    owner.healthy = True


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/generate", {"message", "type", "param", "code"}),
        ("/v1/messages", {"type", "message"}),
        ("/api/chat", None),
    ],
)
def test_where_no_replica_is_well_the_answer_is_503_in_the_protocols_shape(
    three: Row, path: str, shape: set[str] | None
) -> None:
    for fake in three.fakes:
        fake.healthy = False
    try:
        wait("all are out", lambda: three.post(path=path).status_code == 503)
        answer = three.post(path=path)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert answer.headers["content-type"] == "application/json"
        told = answer.json()["error"]
        assert isinstance(told, str) if shape is None else set(told) == shape
    finally:
        for fake in three.fakes:
            fake.healthy = True


def test_a_body_of_a_mebibyte_passes_and_a_larger_one_is_refused(three: Row) -> None:
    assert three.post({"prompt": "x" * ((1 << 20) - 20)}).status_code == 200
    refused = three.post({"prompt": "x" * (2 << 20)})
    assert refused.status_code == 413
    assert refused.json()["error"]["code"] == "gateway"


def test_a_client_has_a_rate(tmp_path: Path) -> None:
    with row(1, tmp_path, {"GATEWAY_CLIENT_RATE": "1"}) as one:
        found: dict[int, httpx.Response] = {}

        def both() -> bool:
            """Until one has passed and one has not: each second lets another one pass."""
            for _ in range(4):
                answer = one.client.get("/v1/models")
                found[answer.status_code] = answer
            return {200, 429} <= set(found)

        wait("some pass, some are refused", both)
        refused = found[429]
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"


def test_a_gateway_that_is_ended_lets_answers_end(tmp_path: Path) -> None:
    with row(1, tmp_path) as one, ThreadPoolExecutor(1) as pool:
        release = one.fakes[0].held = threading.Event()
        answer = pool.submit(one.post)
        wait("it is under way", lambda: bool(one.fakes[0].asked))
        one.gateway.process.terminate()
        port = httpx.URL(one.gateway.url).port
        wait("no new connection", lambda: not answers(f"http://127.0.0.1:{port}/health"))
        assert one.gateway.process.poll() is None
        release.set()
        assert answer.result().status_code == 200
        assert one.gateway.process.wait(60) == 0


def test_the_figures_that_dashboards_and_alerts_read_are_there(three: Row) -> None:
    three.fakes[0].status = three.fakes[1].status = 429
    for number in range(20):
        three.post(headers={"X-Session-ID": str(number)})

    def missing() -> set[str]:
        page = three.gateway.page()
        names = {line.partition("{")[0] for line in page.splitlines()}
        return set(queries.GATEWAY) - names

    wait("all are there", lambda: not missing())  # histograms come a few seconds later
    labels = {label for known in queries.GATEWAY.values() for label in known}
    assert {label for label in labels if f"{label}=" not in three.gateway.page()} == set()
