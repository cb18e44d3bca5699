"""Which replica is asked, and what happens if one refuses, breaks off, hangs or is gone."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import httpx
import pytest

from specops.http.errors import ApiError
from specops.http.protocols import PROTOCOLS
from specops.http.security.request_body import MAX_BATCH_BYTES
from specops.http.sse import END_OF_STREAM
from specops.system import logs
from tests.deploy.gateway.running import Fake, Row, row
from tests.stack import queries
from tests.waiting import answers, wait

EJECTIONS = "envoy_cluster_outlier_detection_ejections_enforced_total"
SESSION = {"X-Session-ID": "7"}
STRANGE_ID = 'r-"1\\'  # of a request
EVENTS = b"data: 1\n\ndata: 2\n\n"


@pytest.fixture(scope="module")
def three_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Row]:
    with row(3, tmp_path_factory.mktemp("three")) as running:
        yield running


@pytest.fixture
def three(three_of_all: Row) -> Iterator[Row]:
    """Three healthy replicas that have got no request."""
    gateway, fakes = three_of_all.gateway, three_of_all.fakes
    for fake in fakes:
        fake.reset()
    numbers = count()

    def all_in() -> bool:
        three_of_all.post(headers={"X-Session-ID": f"first {next(numbers)}"})
        return all(fake.asked for fake in fakes)

    wait("all are in", all_in)
    for fake in fakes:
        fake.reset()
    before = gateway.figure(EJECTIONS)
    yield three_of_all
    if any(fake.broken == "before" and fake.asked for fake in fakes):
        wait("the one that broke off is out", lambda: gateway.figure(EJECTIONS) > before)


def asked(three: Row) -> list[int]:
    return [len(fake.asked) for fake in three.fakes]


def owner(three: Row) -> Fake:
    """The replica of the session, which has got one request of it."""
    three.post(headers=SESSION)
    (found,) = (fake for fake in three.fakes if fake.asked)
    return found


def replica(three: Row) -> int:
    """The replica that answers a request of the session."""
    answer = three.post(headers=SESSION)
    assert answer.status_code == 200
    return int(answer.json()["replica"])


def test_a_session_stays_with_its_replica_and_sessions_are_spread(three: Row) -> None:
    for _ in range(9):
        assert three.post(headers=SESSION).status_code == 200
    assert sorted(asked(three)) == [0, 0, 9]
    for number in range(60):
        assert three.post(headers={"X-Session-ID": str(number)}).status_code == 200
        assert three.client.get("/v1/models").status_code == 200
    assert min(asked(three)) > 5
    assert min(fake.others for fake in three.fakes) > 5  # what does not generate goes to any


def test_a_session_that_is_too_busy_for_one_replica_is_bounded(three: Row) -> None:
    release = threading.Event()
    for fake in three.fakes:
        fake.held = release
    with ThreadPoolExecutor(24) as pool:
        running = []
        for number in range(24):  # in turn: a request that only connects does not count as active
            running.append(pool.submit(three.post, headers=SESSION))
            wait("it is under way", lambda number=number: sum(asked(three)) == number + 1)
        counts = asked(three)
        release.set()
        assert all(future.result().status_code == 200 for future in running)
    assert sorted(counts) == [2, 11, 11]  # 1.25 times the mean, and the one that fills it


@pytest.mark.parametrize("refusal", [429, 503, "break"])
def test_another_replica_is_asked_after_a_refusal_or_a_break(
    three: Row, refusal: int | str
) -> None:
    first = owner(three)
    if refusal == "break":
        first.broken = "before"
    else:
        first.status, first.headers = int(refusal), {"Retry-After": "60"}
    assert replica(three) != first.port


@pytest.mark.parametrize("status", [200, 400, 422, 500])
def test_any_other_answer_is_passed_on(three: Row, status: int) -> None:
    for fake in three.fakes:
        fake.status = status
    assert three.post().status_code == status
    assert sum(asked(three)) == 1


@pytest.mark.parametrize("waits", [(9, 4, 7), (4, 9, 7), (7, 9, 4)])
def test_if_all_refuse_the_client_gets_the_shortest_wait(
    three: Row, waits: tuple[int, ...]
) -> None:
    for fake, seconds in zip(three.fakes, waits, strict=True):
        fake.status, fake.headers = 429, {"Retry-After": str(seconds)}
    for number in range(20):
        before = asked(three)
        answer = three.post(headers={"X-Session-ID": str(number), "X-Request-ID": "the-same"})
        assert answer.status_code == 429
        grown = zip(waits, before, asked(three), strict=True)
        waits_seen = [seconds for seconds, earlier, now in grown if now > earlier]
        assert answer.headers["retry-after"] == str(min(waits_seen))
    # All are asked each time, unless a slow machine lets one miss its checks for a moment.
    assert min(asked(three)) >= 15


def test_nothing_is_tried_again_once_an_answer_has_begun(three: Row) -> None:
    for fake in three.fakes:
        fake.broken = "within"
    with pytest.raises(httpx.RemoteProtocolError):
        three.post()
    assert sum(asked(three)) == 1


@pytest.mark.parametrize("events", [b"", EVENTS, EVENTS * 40_000])
def test_a_whole_stream_reaches_the_client_in_chunks(three: Row, events: bytes) -> None:
    for fake in three.fakes:
        fake.streamed = events + END_OF_STREAM
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
        fake.streamed, fake.headers = cut, {"X-Request-ID": STRANGE_ID}
    answer = three.post(path=path)
    assert answer.status_code == 200
    message = "the replica that wrote this answer is gone; ask again"
    gone = ApiError(500, message, code="replica_gone")
    ending = answer.content.removeprefix(cut)
    token = logs.request_id.set(STRANGE_ID)
    assert ending == (b"" if cut is EVENTS else b"\n\n") + PROTOCOLS.of(path).error_event(gone)
    logs.request_id.reset(token)
    assert sum(asked(three)) == 1


@pytest.mark.parametrize("fault", ["break", "503"])
def test_the_first_fault_takes_a_replica_out_and_a_check_brings_it_back(
    three: Row, fault: str
) -> None:
    first, before = owner(three), three.gateway.figure(EJECTIONS)
    first.status = 429
    three.post(headers=SESSION)
    assert three.gateway.figure(EJECTIONS) == before  # a full replica stays in
    first.status, first.broken = (200, "before") if fault == "break" else (503, "")
    three.post(headers=SESSION)
    wait("it is out", lambda: three.gateway.figure(EJECTIONS) == before + 1)
    first.reset()
    wait("it is back", lambda: replica(three) == first.port)


def test_a_replica_that_drains_gets_no_requests(three: Row) -> None:
    first = owner(three)
    first.healthy = False
    wait("it is out", lambda: replica(three) != first.port)
    before = len(first.asked)
    assert replica(three) != first.port
    assert len(first.asked) == before


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/generate", {"message", "type", "param", "code"}),
        ("/v1/messages", {"type", "message"}),
        ("/api/chat", None),
    ],
)
def test_if_no_replica_is_healthy_the_answer_is_503_in_the_protocols_form(
    three: Row, path: str, fields: set[str] | None
) -> None:
    for fake in three.fakes:
        fake.healthy = False
    wait("all are out", lambda: three.post(path=path).status_code == 503)
    answer = three.post(path=path)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert isinstance(error, str) if fields is None else set(error) == fields


def test_a_body_as_large_as_any_passes_and_a_larger_one_is_refused(three: Row) -> None:
    assert three.post({"prompt": "x" * (MAX_BATCH_BYTES - 20)}).status_code == 200
    refused = three.post({"prompt": "x" * (MAX_BATCH_BYTES + (1 << 20))})
    assert refused.status_code == 413
    assert refused.json()["error"]["code"] == "gateway"


def test_a_client_has_a_rate(tmp_path: Path) -> None:
    with row(1, tmp_path, {"GATEWAY_CLIENT_RATE": "1"}) as one:
        found: dict[int, httpx.Response] = {}

        def both() -> bool:
            """Some requests pass and some do not: each second one more passes."""
            for _ in range(4):
                answer = one.client.get("/v1/models")
                found[answer.status_code] = answer
            return {200, 429} <= set(found)

        wait("some pass, some are refused", both)
        assert found[429].headers["retry-after"] == "1"
        assert found[429].json()["error"]["type"] == "rate_limit_error"


def test_a_gateway_that_is_ended_lets_answers_end(tmp_path: Path) -> None:
    with row(1, tmp_path) as one, ThreadPoolExecutor(1) as pool:
        release = one.fakes[0].held = threading.Event()
        answer = pool.submit(one.post)
        wait("it is under way", lambda: bool(one.fakes[0].asked))
        one.gateway.process.terminate()
        wait("no new connection", lambda: not answers(f"{one.gateway.url}/health"))
        assert one.gateway.process.poll() is None
        release.set()
        assert answer.result().status_code == 200
        assert one.gateway.process.wait(60) == 0


def test_the_figures_of_dashboards_and_alerts_exist(three: Row) -> None:
    three.fakes[0].status = three.fakes[1].status = 429
    for number in range(20):
        three.post(headers={"X-Session-ID": str(number)})

    def missing() -> set[str]:
        names = {line.partition("{")[0] for line in three.gateway.page().splitlines()}
        return set(queries.GATEWAY) - names

    wait("all are there", lambda: not missing())  # histograms come a few seconds later
    labels = {label for known in queries.GATEWAY.values() for label in known}
    assert {label for label in labels if f"{label}=" not in three.gateway.page()} == set()
