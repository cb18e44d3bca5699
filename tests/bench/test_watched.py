"""What being watched costs: the watchers look on as told, and shares follow from rates by hand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from bench import watched
from bench.watched import MANY
from bench.watcher import WatcherError, watcher
from tests.bench.runs import MODEL

PAGE = b"specops_rows 4.0\n# EOF\n"


class Service(BaseHTTPRequestHandler):
    """Has a page of metrics, and figures ten times a second."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[tuple[str, str]]]

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Accept", "")))
        self.send_response(200)
        if self.path == "/metrics":
            self.send_header("Content-Length", str(len(PAGE)))
            self.end_headers()
            self.wfile.write(PAGE)
            return
        self.close_connection = True
        self.end_headers()
        try:
            while True:
                self.wfile.write(b'data: {"figures": {}}\n\n')
                time.sleep(0.1)  # the pace of the figures
        except OSError:
            return  # whoever looked on has left

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def service() -> Iterator[tuple[int, list[tuple[str, str]]]]:
    """Its port, and what it was asked for."""
    seen: list[tuple[str, str]] = []
    handler = type("Handler", (Service,), {"seen": seen})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, seen
        server.shutdown()


def test_watchers_come_and_go_as_they_are_told(
    service: tuple[int, list[tuple[str, str]]],
) -> None:
    port, seen = service
    with watcher(port) as process:
        assert process.tell("watch", 0) == {"watching": 0}
        assert process.tell("leave") == {"scrapes": 0, "figures": 0}
        assert seen == []
        assert process.tell("watch", 3) == {"watching": 3}
        assert [path for path, _ in seen] == 3 * ["/console/figures"]
        assert process.tell("leave")["figures"] >= 3


def test_a_scrape_asks_for_what_prometheus_asks_for(
    service: tuple[int, list[tuple[str, str]]],
) -> None:
    port, seen = service
    with watcher(port) as process:
        assert process.tell("scrape", 4) == {"scrapes": 4, "bytes": len(PAGE)}
    assert [path for path, _ in seen] == 4 * ["/metrics"]
    assert all("application/openmetrics-text" in accept for _, accept in seen)


def test_a_service_that_does_not_answer_is_an_error() -> None:
    with watcher(1) as process, pytest.raises(WatcherError):
        process.tell("watch", 1)


def a_run(one: list[float], many: list[float]) -> dict[str, Any]:
    rates = {"nobody": [100.0] * len(one), "one of each": one, "twenty of each": many}
    costs = {
        **{"scrape_service": 2.0, "scrape_watcher": 1.0},
        **{"figures_service": 0.25, "figures_watcher": 0.5, "page_bytes": 30_000},
    }
    return {"rates": {"1": rates}, "costs": costs}


def test_shares_are_taken_round_by_round_and_over_all_runs() -> None:
    plan = watched.Plan(rounds=4, seconds=5.0, new_tokens=16, clients=(1,))
    runs = [a_run([99.0, 100.0, 98.0, 99.0], [90.0, 92.0, 88.0, 90.0]) for _ in range(2)]
    found = watched.outcome(MODEL, runs, plan)
    assert json.loads(json.dumps(found.result))["runs"] == runs
    assert found.result["shares"]["1"]["one of each"] == (0.99, 0.98, 1.0)
    (table,) = found.tables
    (row,) = table.rows
    dash = "\N{EN DASH}"
    assert row[:2] == ("1", "100")
    assert row[2:4] == (f"0.990 [0.980{dash}1.000]", f"0.900 [0.880{dash}0.920]")
    assert row[4] == f"{10 / MANY:.2f} [{8 / MANY:.2f}{dash}{12 / MANY:.2f}]"
    assert "a scrape (30 kB) takes the service 2.00 ms" in table.text()
