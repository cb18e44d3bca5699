"""Locust's page as a person uses it: the form, START, the tabs, STOP and the report."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.loopback import HOST, free_port, listening
from tests.stack.support import ROOT, START_SECONDS, tool
from tests.stack.test_load_test import (
    PATIENT,
    StandIn,
    check_figures,
    locust_command,
    written,
)
from tests.waiting import PATIENCE, answers, started, wait

# What the form must not show: it is for the command line.
HIDDEN = {"gate", "objective", "report", "api_key", "allowed_hosts"}


@contextmanager
def load_page(api: str, log: Path, *command: str) -> Iterator[str]:
    """Run a command that serves Locust's page for an API; yield the page's address."""
    port = free_port()
    own = {"LOCUST_PORT": str(port), "TARGET_URL": api, "LOAD_API_KEY": "a-secret"}
    words, page = [word.replace("PORT", str(port)) for word in command], f"http://{HOST}:{port}"
    rest = {"env": {**os.environ, **own}, "cwd": ROOT, "whole": True}
    # make may install a change first
    with started(words, log, lambda: answers(page), seconds=START_SECONDS, **rest):
        yield page
    assert "Traceback" not in log.read_text()


def form_of(page: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The page's own fields, and the values with which its form would be posted unchanged."""
    (found,) = re.findall(r"window\.templateArgs = (.*)\n", httpx.get(page, timeout=PATIENCE).text)
    arguments = json.loads(found)
    fields = arguments["extra_options"]
    form = {name: field["default_value"] for name, field in fields.items()}
    form = {name: str(v).lower() if isinstance(v, bool) else v for name, v in form.items()}
    return arguments, {"user_count": 1, "spawn_rate": 1, "host": arguments["host"], **form}


def post(page: str, path: str, form: Any = None) -> dict[str, Any]:
    answer = httpx.post(f"{page}/{path}", data=form, timeout=PATIENCE)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def stats(page: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{page}/stats/requests", timeout=PATIENCE).json()
    return found


def ready(page: str) -> bool:
    """Whether a test can be started: nothing runs, and the workers, if any, have stopped, too."""
    found = stats(page)
    workers = found.get("workers", [])
    return found["state"] in ("ready", "stopped") and all(w["state"] == "ready" for w in workers)


STARTED_AGAIN = """
import gevent, page
from types import SimpleNamespace

ended = []

def started(state):
    after = gevent.spawn_later(0.05, ended.append, state)
    page.let_the_last_end(SimpleNamespace(state=state, shape_greenlet=after))
    return list(ended)

assert started("stopped") == ["stopped"]
try:
    started("running")
except ValueError as error:
    print(error)
"""


def test_a_start_waits_for_the_report_of_the_last_test_and_not_for_one_that_runs() -> None:
    """Locust drops such a start, and says that it was one."""
    if (locust := tool("locust")) is None:
        pytest.skip("Locust is not installed (extra `load`)")
    command = [str(Path(locust).with_name("python")), "-c", STARTED_AGAIN]
    done = subprocess.run(
        command, cwd=ROOT / "loadtest", capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("A test is running: press STOP first\n", "")


def counts(page: str) -> tuple[int, int]:
    """Requests by Locust's total, and answers by our own table."""
    found = stats(page)
    rates = {table["key"]: table["data"] for table in found["extended_stats"]}["llm-rates"]
    (answered,) = (row["column1"] for row in rates if row["column0"] == "Requests answered")
    return found["stats"][-1]["num_requests"], int(answered.replace(",", ""))


@pytest.mark.parametrize(
    "processes",
    [(), pytest.param(("--processes", "2"), marks=pytest.mark.e2e)],
    ids=["one", "two processes"],
)
def test_the_form_starts_a_test_and_a_second_start_begins_anew(
    processes: tuple[str, ...], tmp_path: Path
) -> None:
    if tool("locust") is None:
        pytest.skip("Locust is not installed (extra `load`)")
    api = StandIn()
    with listening(api.handler()) as port:
        target = f"http://{HOST}:{port}"
        patient = written(tmp_path / "patient.py", PATIENT)
        command = [word for word in locust_command(target, patient) if word != "--headless"]
        web = ("--web-host", HOST, "--web-port", "PORT", *processes)
        with load_page(target, tmp_path / "log", *command, *web) as page:
            arguments, form = form_of(page)
            assert not HIDDEN & set(form)
            assert "a-secret" not in httpx.get(page, timeout=PATIENCE).text
            assert arguments["hide_common_options"] is False
            for name, field in arguments["extra_options"].items():
                assert 10 < len(name) + len(field["help_text"]) < 100, name

            refused = post(page, "swarm", form | {"turns": "many"})
            assert refused["success"] is False
            assert refused["message"] == "Turns must be a whole number, not 'many'"
            refused = post(page, "swarm", form | {"host": "http://127.0.0.1:9"})
            assert refused["message"].startswith("nothing answers at http://127.0.0.1:9")
            refused = post(page, "swarm", form | {"dataset": "../options.py"})
            assert refused["success"] is False
            assert "not a path: '../options.py'" in refused["message"]
            assert api.asked == []
            if processes:
                wait("both are connected", lambda: stats(page).get("worker_count") == 2)
                refused = post(page, "swarm", form | {"number_of_requests": 9})
                assert "2 processes" in refused["message"]
            for requests in (30, 12):  # each test's figures are its own
                api.asked.clear()
                wait("it can start", lambda: ready(page))
                started = post(
                    page, "swarm", form | {"user_count": 2, "number_of_requests": requests}
                )
                assert started["success"], started
                wait("it ends by itself", lambda: stats(page)["state"] == "stopped")
                wait("all is counted", lambda n=requests: counts(page) == (n, n))
                assert len(api.asked) == requests
            wait("it can start", lambda: ready(page))
            api.seen.clear()
            assert post(page, "swarm", form | {"user_count": 3, "number_of_requests": 0})["success"]
            wait("three users ask", lambda: stats(page)["user_count"] == 3 and counts(page)[1] > 20)
            post(page, "stop")
            wait("it stops", lambda: stats(page)["state"] == "stopped")
            report = httpx.get(f"{page}/stats/report?download=1", timeout=PATIENCE).text
            assert "TTFT: time to first token" in report
            figures = httpx.get(f"{page}/llm/report.json", timeout=PATIENCE).json()
            check_figures(api, figures)
            assert 0 < figures["whole"]["users"] < 3  # they came one by one
            lines = httpx.get(f"{page}/llm/stages.csv", timeout=PATIENCE).text.splitlines()
            assert lines[0].startswith("asked_users,asked_per_second,seconds,")
            assert len(lines) == 2
