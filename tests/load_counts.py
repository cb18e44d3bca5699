"""What load tests report, stage by stage, beside what the API's own counters say.

    python -m tests.load_counts              nine load tests of the default model: eight minutes
    python -m tests.load_counts ramp spike   those whose titles begin so

A thread reads /metrics five times a second. The report counts a request in the stage in which it
was sent; the API counts it when it arrives, is refused, or is admitted. So a stage's counts lie
between those of the last reading before its limits and of the first one `SLACK` after them. Tokens
of answers may be made in a later stage: as many as the requests that were in flight at the limits
can have. The tokens of a prompt come with its answer: of requests that were cut off at the end the
API alone knows them. Otherwise every count of the whole run is equal.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.tools.repeating import repeating
from tests.kinds import running
from tests.stack.support import ROOT
from tests.stack.test_load_page import form_of, load_page, post, stats
from tests.waiting import PATIENCE, wait

SLACK = 0.5  # seconds from sending a request to its being counted, on a busy machine
READ_SECONDS = 0.2
RUN_SECONDS = 300.0
SHORT = ("--length-scale", "0.25", "--seed", "1", "--stop-timeout", "60")
# By the name in the report: the API's counters whose sum it is.
COUNTERS = {
    "sent": ("specops_load_test_requests_total",),
    "refused": ("specops_requests_rejected_total",),
    "input_tokens": ("specops_client_prompt_tokens_total",),
    "output_tokens": ("specops_generated_tokens_total",),
}
IN_FLIGHT = ("specops_requests_running", "specops_requests_waiting")
LENGTHS = {
    "specops_request_prompt_tokens_bucket": "input_tokens",
    "specops_request_generated_tokens_bucket": "output_tokens",
}


@dataclass(frozen=True)
class Reading:
    """The API's counters, read between two times by `time.time()`."""

    begun: float
    ended: float
    counts: Mapping[str, float]
    in_flight: float
    longest: Mapping[str, float]  # prompt and answer, in tokens: the limits of their buckets


@dataclass
class Readings:
    """All of a run, in order."""

    api: str
    found: list[Reading] = field(default_factory=list)

    def read(self) -> None:
        begun = time.time()
        text = httpx.get(f"{self.api}/metrics", timeout=PATIENCE).text
        ended, sums = time.time(), dict[str, float]()
        below = {name: dict[float, float]() for name in LENGTHS.values()}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
                if sample.name in LENGTHS:
                    limit = float(sample.labels["le"])
                    below[LENGTHS[sample.name]][limit] = sample.value
        counts = {name: sum(sums[one] for one in parts) for name, parts in COUNTERS.items()}
        longest = {
            name: next(limit for limit in limits if limits[limit] == limits[float("inf")])
            for name, limits in below.items()
        }
        in_flight = sum(sums[name] for name in IN_FLIGHT)
        self.found.append(Reading(begun, ended, counts, in_flight, longest))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read until the block ends, and once more."""
        self.read()
        try:
            with repeating(self.read, READ_SECONDS):
                yield
        finally:
            self.read()

    def limits(self, at: float) -> tuple[Reading, Reading]:
        """The last reading before a time, and the first one of which the time is over."""
        before = [one for one in self.found if one.ended <= at]
        after = [one for one in self.found if one.begun >= at + SLACK]
        return (before or self.found)[-1 if before else 0], (after or self.found[-1:])[0]


def reported(figures: Mapping[str, Any]) -> dict[str, float]:
    """The report's counts of a stage or of the whole, by the names of `COUNTERS`."""
    ends = ("answered", "refused", "failed", "cancelled")
    return {**figures, "sent": sum(figures[name] for name in ends)}


def compare(name: str, report: Mapping[str, Any], readings: Readings) -> Iterator[str]:
    """Rows of the table; a count that differs is marked by `!`."""
    stages, first, last = report["stages"], readings.found[0], readings.found[-1]
    begins = accumulate((stage["asking_seconds"] for stage in stages), initial=report["started"])
    at = [readings.limits(begin) for begin in begins]
    at[0], at[-1] = (first, first), (last, last)  # nothing was before, nothing comes after
    rows = [
        (str(number), stage, *at[number - 1 : number + 1]) for number, stage in enumerate(stages, 1)
    ]
    for label, stage, begin, end in [*rows, ("all", report["whole"], at[0], at[-1])]:
        during = [r.in_flight for r in readings.found if begin[1].begun <= r.begun <= end[0].begun]
        asked = stage.get("asked_users")
        users = f"{stage['users']:.2f} of {asked}" if asked else "-"
        # Who leaves waits for an answer: those of the stage before may still be there.
        present = max((s["asked_users"] for s in stages), default=0) if asked is None else asked
        good = not present or max(during) <= present + begin[0].in_flight
        cells = [users, f"{max(during):.0f}{'' if good else ' !'}"]
        for key in COUNTERS:
            told = reported(stage)[key]
            least, most = (end[i].counts[key] - begin[1 - i].counts[key] for i in (0, 1))
            if key == "input_tokens":
                least -= stage["cancelled"] * last.longest[key]
            if key == "output_tokens":
                least -= begin[1].in_flight * last.longest[key]
                most += end[1].in_flight * last.longest[key]
            equal = f"{least:.0f}" if least == most else f"{least:.0f} to {most:.0f}"
            cells.append(f"{told:,.0f} / {equal}{'' if least <= told <= most else ' !'}")
        yield f"| {name} | {label} | {' | '.join(cells)} |"


def by_command(
    api: str, folder: Path, *options: str, stop: Callable[[], bool] | None = None
) -> Any:
    """Run a load test in the terminal, to its end or until Ctrl-C; returns its report."""
    report = folder / "report.json"
    command = ["scripts/load", *options, *SHORT, "--report", str(report)]
    with (folder / "load.log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "TARGET_URL": api},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        if stop:
            wait("it can be stopped", stop, RUN_SECONDS)
            os.killpg(process.pid, signal.SIGINT)
        process.wait(RUN_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode in (0, 2), (
        folder / "load.log"
    ).read_text()  # 2: a slow machine's gates
    return json.loads(report.read_text())


def by_page(api: str, folder: Path, *options: str) -> Any:
    """Run a load test of three users from Locust's page; returns its report."""
    with load_page(api, folder / "load.log", "scripts/load", "--web", *options) as page:
        wait("its processes are there", lambda: stats(page).get("worker_count", 1) == 2)
        _, form = form_of(page)
        form |= {"user_count": 3, "spawn_rate": 3, "run_time": "30s", "length_scale": 0.25}
        started = post(page, "swarm", form)
        assert started["success"], started
        wait("it ends", lambda: stats(page)["state"] == "stopped", RUN_SECONDS)
        return httpx.get(f"{page}/llm/report.json", timeout=PATIENCE).json()


def trace(folder: Path) -> str:
    """A trace of 30 seconds."""
    lines = [f"2023-11-16 18:15:{n:02}.0,{60 + 40 * (n % 9)},{20 + n}" for n in range(30)]
    (path := folder / "trace.csv").write_text(
        "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines])
    )
    return str(path)


def main() -> int:
    """Run all; returns 1 if any count differs."""
    two = ("--processes", "2")
    with tempfile.TemporaryDirectory() as name, running(folder := Path(name)) as api:
        readings = Readings(api)

        def in_second_stage() -> bool:
            return readings.found[-1].in_flight > 4  # of the first stage's users there are two

        runs: dict[str, Callable[[], Any]] = {}
        for shape, options in {
            "users": ("-u", "4", "-r", "4", "-t", "30s"),
            "arrivals": ("--time-scale", "0.25", "--request-rate", "2", *two),
            "trace": ("--dataset", trace(folder)),
            "smoke": two,
            "ramp": ("--time-scale", "0.2", "--rate-scale", "0.5"),
            "spike": ("--time-scale", "0.3", *two),
            "soak": ("--time-scale", "0.04", *two),
        }.items():
            title = f"{shape}, {2 if two[0] in options else 1}"
            runs[title] = partial(by_command, api, folder, "--shape", shape, *options)
        runs["users, 2, by page"] = partial(by_page, api, folder, *two)
        spike = ("--shape", "spike", "--time-scale", "0.5", *two)
        runs["spike, 2, Ctrl-C"] = partial(by_command, api, folder, *spike, stop=in_second_stage)
        print(
            "| load test, processes | stage | users: mean of asked | most in flight at the API | ",
            end="",
        )
        print("requests sent | refused | input tokens | output tokens |\n" + "|---" * 8 + "|")
        wrong = 0
        for title, run in runs.items():
            if not title.startswith(tuple(sys.argv[1:]) or ""):
                continue
            readings.found.clear()
            with readings.reading():
                report = run()
            for row in compare(title, report, readings):
                print(row, flush=True)
                wrong += "!" in row
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
