"""What traces cost: CPU seconds of the same requests without them, with them, and before a change.

Each side is the real service in a process of its own, on one thread: without a pool of threads none
spins, so CPU seconds are work. Sides take turns prompt by prompt, so that what disturbs one
disturbs all. Sending spans counts, at the SDK's own pace of every five seconds.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from bench.models import BenchModel
from bench.serving.server import Client, environment, serving
from bench.tools.quiet import cpu_seconds
from bench.tools.report import Outcome, Summary, Table, Wanted, progress, ratios, rotated
from specops.config import PREFIX, ConfigError

OFF, ON, OTHER = "off", "on", "the other checkout"
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_SPANS = 4  # of a request
_WANTED = {OFF: 1.01, ON: 1.03}  # of the other checkout's CPU seconds, or else of those without


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `rounds` of so many requests of so many tokens for each side."""

    rounds: int
    requests: int
    tokens: int = 64


FULL = Plan(rounds=20, requests=50)
QUICK = Plan(rounds=2, requests=4)


@dataclass(slots=True)
class _Collector:
    """Takes what is sent."""

    url: str = ""
    bytes: int = 0


@contextlib.contextmanager
def _collecting() -> Iterator[_Collector]:
    found = _Collector()

    class Receiver(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:  # what `http.server` calls
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.bytes += len(body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        found.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield found
        finally:
            server.shutdown()  # else its thread asks a closed socket for ever


def run(model: BenchModel, prompts: Sequence[str], plan: Plan, other: Path | None) -> Outcome:
    """Measure the sides; without another checkout the one without traces is the measure."""
    settings = replace(model.settings, threads=1, slots=1)
    seconds: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        collector = stack.enter_context(_collecting())
        sides: dict[str, tuple[int, Client]] = {}
        if other is not None:
            python = other / ".venv" / "bin" / "python"
            if not python.is_file():
                raise ConfigError(f"{other} has no .venv/bin/python: run `make test` there once")
            unknown = _unknown(python, set(environment(settings)))

            def of_the_other(command: list[str]) -> list[str]:
                return ["env", *(f"--unset={name}" for name in unknown), str(python), *command[1:]]

            sides[OTHER] = stack.enter_context(serving(settings, of_the_other))
        sides[OFF] = stack.enter_context(serving(settings))
        traced = ["env", f"{_ENDPOINT}={collector.url}"]
        sides[ON] = stack.enter_context(serving(settings, lambda command: [*traced, *command]))
        _serve(sides, prompts[: plan.requests], plan.tokens)  # first requests make what others find
        for number in range(plan.rounds):
            progress(f"round {number + 1} of {plan.rounds}")
            begin = number * plan.requests
            asked = [prompts[(begin + i) % len(prompts)] for i in range(plan.requests)]
            for name, taken in _serve(sides, asked, plan.tokens).items():
                seconds.setdefault(name, []).append(taken)
    # The services have ended, and sent what they had.
    spans = (plan.rounds + 1) * plan.requests * _SPANS
    return outcome(seconds, plan, OTHER if other is not None else OFF, collector.bytes / spans)


def _unknown(python: Path, names: set[str]) -> set[str]:
    """The settings that another checkout does not have."""
    code = (
        "from dataclasses import fields; from specops.config import PREFIX, Settings; "
        "print(*(PREFIX + item.name.upper() for item in fields(Settings)))"
    )
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    return {name for name in names if name.startswith(PREFIX)} - set(found.split())


def _serve(
    sides: Mapping[str, tuple[int, Client]], prompts: Sequence[str], tokens: int
) -> dict[str, float]:
    """CPU seconds of each side for the same requests, one after the other."""
    before = {name: cpu_seconds(pid) for name, (pid, _) in sides.items()}
    for number, prompt in enumerate(prompts):
        body = {"prompt": prompt, "max_new_tokens": tokens, "ignore_eos": True}
        for name in rotated(list(sides), number):
            sides[name][1].generate(body)
    return {name: cpu_seconds(pid) - before[name] for name, (pid, _) in sides.items()}


def outcome(
    seconds: dict[str, list[float]], plan: Plan, measure: str, bytes_per_span: float
) -> Outcome:
    """A row for each side."""
    rows, wanted = [], []
    for name, found in seconds.items():
        share = Summary.of(ratios(found, seconds[measure]))
        mean = sum(found) / len(found) / plan.requests
        rows.append((name, f"{sum(found):.2f}", f"{mean * 1e3:.2f}", share.spread(3)))
        if name != measure:
            what = f"traces {name}: CPU seconds, share of {measure}"
            wanted.append(Wanted(what, _WANTED[name], share.median, at_most=True))
    columns = ("traces", "CPU seconds", "ms a request", f"share of {measure}")
    notes = (
        f"{plan.rounds} rounds of {plan.requests} requests of {plan.tokens} tokens, one after the "
        "other and side by side, on one thread; shares: medians with quartiles, round by round",
        f"a span takes {bytes_per_span:.0f} bytes on its way to the collector",
    )
    table = Table("CPU seconds of requests, with traces and without", columns, rows, notes)
    result = {"plan": asdict(plan), "seconds": seconds, "bytes_per_span": bytes_per_span}
    return Outcome(result, [table], wanted=wanted)
