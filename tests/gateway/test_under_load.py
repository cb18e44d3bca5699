"""Replicas are killed, stopped, full and restarted under load, and no client is refused for it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import httpx
import pytest

from tests.gateway.replicas import GONE, Fleet, Replica, fleet, load
from tests.waiting import wait

pytestmark = pytest.mark.e2e

CLIENTS = 9


@pytest.fixture(scope="module")
def three_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(3, tmp_path_factory.mktemp("fleet")) as running:
        yield running


@pytest.fixture
def three(three_of_all: Fleet) -> Fleet:
    """All three, in rotation."""
    three_of_all.wait_all_in()
    return three_of_all


def test_nobody_fails_while_all_are_well(three: Fleet) -> None:
    with load(three.gateway.url, CLIENTS) as seen:
        seen.wait_more(60)
        asked = "specops_requests_total"
        wait("all are asked", lambda: all(one.figure(asked) > 0 for one in three.replicas))
    assert (seen.failed, seen.cut, seen.told) == ([], 0, 0)


def test_a_killed_replica_costs_only_what_it_had_begun_to_stream(three: Fleet) -> None:
    victim = three.replicas[0]
    with load(three.gateway.url, CLIENTS) as seen:
        seen.wait_more(30)
        victim.running.kill()
        victim.running.wait()
        seen.wait_more(60)
        victim.start()
        victim.wait_ready()
        three.wait_all_in()
        wait("it is asked again", lambda: victim.figure("specops_requests_total") > 0)
        seen.wait_more(30)
    assert (seen.failed, seen.cut) == ([], 0)
    assert seen.told <= CLIENTS


def test_streams_of_a_killed_replica_end_with_an_error_event(three: Fleet) -> None:
    victim = three.replicas[0]
    begun, texts = Barrier(CLIENTS + 1), []

    def ask(session: int) -> None:
        body = {"prompt": "def a(b):", "max_new_tokens": 900, "ignore_eos": True, "stream": True}
        url, headers = f"{three.gateway.url}/generate", {"X-Session-ID": str(session)}
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
            assert answer.status_code == 200
            pieces = answer.iter_text()
            first = next(pieces)
            begun.wait(60)
            texts.append(first + "".join(pieces))

    with ThreadPoolExecutor(CLIENTS) as pool:
        running = [pool.submit(ask, session) for session in range(CLIENTS)]
        begun.wait(60)
        victim.running.kill()
        victim.running.wait()
        for one in running:
            one.result()
    whole = [text for text in texts if text.endswith("data: [DONE]\n\n")]
    told = [text for text in texts if text.endswith(f"{GONE}\n\n")]
    assert told
    assert len(whole) + len(told) == CLIENTS
    victim.start()
    victim.wait_ready()


def test_a_replica_that_hangs_for_a_moment_costs_only_what_it_had_begun(three: Fleet) -> None:
    victim = three.replicas[1]
    with load(three.gateway.url, CLIENTS) as seen:
        seen.wait_more(30)
        victim.running.send_signal(signal.SIGSTOP)
        wait("it is out", lambda: three.gateway.healthy() == 2, 120)
        victim.running.send_signal(signal.SIGCONT)
        seen.wait_more(60)
        three.wait_all_in()
        seen.wait_more(30)
    assert victim.running.poll() is None
    assert (seen.failed, seen.cut) == ([], 0)
    assert seen.told <= CLIENTS


def test_a_hung_replica_is_killed_and_gives_back_what_it_had_taken(three: Fleet) -> None:
    victim = three.replicas[1]
    with load(three.gateway.url, CLIENTS) as seen:
        seen.wait_more(30)
        victim.running.send_signal(signal.SIGSTOP)
        wait("it is out", lambda: three.gateway.healthy() == 2, 120)
        seen.wait_more(60)
        assert victim.running.wait(120) == -signal.SIGKILL
        seen.wait_more(CLIENTS)
        victim.start()
        victim.wait_ready()
        three.wait_all_in()
        wait("it is asked again", lambda: victim.figure("specops_requests_total") > 0)
        seen.wait_more(30)
    assert (seen.failed, seen.cut) == ([], 0)
    assert seen.told <= CLIENTS


def restart(replica: Replica, **settings: object) -> None:
    replica.running.terminate()
    assert replica.running.wait(60) == 0
    replica.start(**settings)
    replica.wait_ready()


def test_a_full_replica_costs_nothing(three: Fleet) -> None:
    full = three.replicas[2]
    restart(full, slots=1, queue_size=0)
    three.wait_all_in()
    with load(three.gateway.url, CLIENTS) as seen:
        wait("it refuses", lambda: full.figure("specops_requests_rejected_total") > 0, 120)
        seen.wait_more(60)
    restart(full)
    assert (seen.failed, seen.cut, seen.told) == ([], 0, 0)


def test_a_rolling_restart_costs_nothing(three: Fleet) -> None:
    with load(three.gateway.url, CLIENTS) as seen:
        for replica in three.replicas:
            seen.wait_more(20)
            restart(replica)
            three.wait_all_in()
        seen.wait_more(30)
    assert (seen.failed, seen.cut, seen.told) == ([], 0, 0)
