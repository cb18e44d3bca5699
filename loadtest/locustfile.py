"""The load test: loads the API as clients do, and measures what they feel.

Beside Locust's row for each request there are rows for other events:

    TTFT    first token     from sending the request to the first token of a stream
    ITL     inter-token     time between a stream's tokens; a step that brings n tokens counts n
                            times an n-th of its time
    TOKENS  per request     a count, not milliseconds: tokens that one request generated
    SPEED   per request     a rate, not milliseconds: tokens after the first, per second, by the
                            server's clock, since a busy client may get several steps at once
    SHED    429             requests that the server refused because its queue was full

An overloaded server should refuse requests, so these count apart and are no failures. The exit
status is 1 if anything failed or nothing succeeded, 2 if a gate of `slo.py` is missed.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import requests
from locust import HttpUser, LoadTestShape, events
from locust.env import Environment
from locust.runners import WorkerRunner

import slo
from protocols import PROTOCOLS
from record import Recorder, write
from shapes import SHAPES, stage_at
from users import CATEGORIES, ClosedLoopUser, OpenLoopUser, credentials


@events.init_command_line_parser.add_listener
def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this load test."""
    option = parser.add_argument
    option("--shape", choices=sorted(SHAPES), default="smoke", env_var="LOAD_SHAPE", help="shape")
    option("--time-scale", type=float, default=1.0, env_var="LOAD_TIME_SCALE", help="on stages")
    option("--rate-scale", type=float, default=1.0, env_var="LOAD_RATE_SCALE", help="on arrivals")
    option("--api", choices=sorted(PROTOCOLS), default="generate", env_var="LOAD_API", help="API")
    option(
        "--category",
        choices=["all", *CATEGORIES],
        default="all",
        env_var="LOAD_CATEGORY",
        help="kind of prompt; all: every one, questions only if the server has a chat model",
    )
    option(
        "--max-new-tokens",
        type=int,
        default=0,
        env_var="LOAD_MAX_NEW_TOKENS",
        help="tokens that each request asks for; 0: a random length for each",
    )
    option(
        "--drafter",
        choices=["", "draft", "suffix", "head", "cascade", "none"],
        default="",
        env_var="LOAD_DRAFTER",
        help="source of draft tokens; empty: the server's default, none: plain decoding",
    )
    option(
        "--api-key",
        default="",
        env_var="LOAD_API_KEY",
        is_secret=True,
        help="API key; of several, separated by commas, the first one",
    )
    for name, what in (("--gate", "for the exit status"), ("--objective", "that define the knee")):
        option(name, action="append", default=[], metavar="NAME=LIMIT", help=f"limits {what}")
    option("--report", default="", env_var="LOAD_REPORT", help="JSON file for the stages' figures")


class Shape(LoadTestShape):
    """Runs the stages of the chosen shape."""

    def tick(self) -> tuple[int, float, list[type[HttpUser]]] | None:
        """Every second: number, spawn rate and class of the users; None ends the run."""
        assert self.runner is not None  # noqa: S101 - Locust sets it before the first tick
        options = self.runner.environment.parsed_options
        stages = SHAPES[options.shape]
        place = stage_at(stages, self.get_run_time() / options.time_scale)
        if place is None:
            return None
        stage = stages[place]
        return stage.users, stage.users, [OpenLoopUser if stage.open_loop else ClosedLoopUser]


# -- what is recorded ------------------------------------------------------------------------------

_begun: list[Environment] = []  # this process's; the events between processes do not carry it


@events.test_start.add_listener
def begin(environment: Environment, **_: Any) -> None:
    """Start to record. Every process does so, at nearly the same time."""
    options = environment.parsed_options
    environment.recorder = Recorder(SHAPES[options.shape], options.time_scale, time.time())
    _begun[:] = [environment]


@events.report_to_master.add_listener
def hand_over(client_id: str, data: dict[str, Any], **_: Any) -> None:
    """Let a worker send what it has recorded since the last time."""
    if _begun:
        data["stages"] = _begun[0].recorder.take()


@events.worker_report.add_listener
def take_over(client_id: str, data: dict[str, Any], **_: Any) -> None:
    """Let the master add it up."""
    if _begun and "stages" in data:
        _begun[0].recorder.add(data["stages"])


@events.init.add_listener
def require_the_key(environment: Environment, **_: Any) -> None:
    """End at once if the API has keys and refuses ours, or its lack."""
    options = environment.parsed_options
    url, headers = f"{environment.host}/v1/models", credentials(options.api_key)
    try:
        answer = requests.get(url, headers=headers, timeout=10)
    except requests.RequestException:
        return  # the users will count that
    if answer.status_code == requests.codes.unauthorized:
        sys.exit("The API refuses this key, or its lack: --api-key or LOAD_API_KEY gives one.")


# -- the end ---------------------------------------------------------------------------------------


@events.quitting.add_listener
def judge(environment: Environment, **_: Any) -> None:
    """Print the results, write the report and set the exit status."""
    if isinstance(environment.runner, WorkerRunner) or not hasattr(environment, "recorder"):
        return
    options, recorder = environment.parsed_options, environment.recorder
    whole, stages = recorder.whole(), recorder.rows(options.rate_scale)
    gates = slo.judge(whole, slo.limits(slo.GATES, options.gate))
    objectives = slo.limits(slo.OBJECTIVES, options.objective)
    best = slo.knee(stages, objectives) if SHAPES[options.shape][0].open_loop else None
    if options.report:
        report = {
            "shape": options.shape,
            "host": environment.host,
            "drafter": options.drafter or "the server's default",
            "api": options.api,
            "category": options.category,
            "objectives": objectives,
            "gates": {verdict.name: verdict.good for verdict in gates},
            "whole": whole,
            "stages": stages,
            "knee": best,
        }
        write(Path(options.report), report)
    print(
        f"\n{whole['answered']} answered, {whole['shed']} shed (429), {whole['failed']} failed; "
        f"{whole['tokens']} tokens, {whole['tokens_per_second']:.1f} per second"
    )
    for verdict in gates:
        print(f"gate: {verdict}")
    if len(stages) > 1 and SHAPES[options.shape][0].open_loop:
        print(f"knee: {best['arrived_per_second']:.1f} per second" if best else "knee: none")
    failed = whole["failed"] or not whole["answered"]
    gates_missed = not all(verdict.good for verdict in gates)
    environment.process_exit_code = 1 if failed else 2 if gates_missed else 0
