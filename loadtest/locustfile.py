"""The load test: sends requests to the API as clients do, and measures their latency.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000

Locust counts HTTP requests. Token times and rates, stages and the knee are in separate tables
(`page.py`). Requests that the server refuses because its queue is full (429) have a separate row
that Locust's totals and charts exclude, and are not failures: an overloaded server should refuse.
The exit status is 1 if anything failed or nothing succeeded, and 2 if a gate of `slo.py` is missed.
"""

import math
import random
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple
from functools import cache
from itertools import accumulate
from pathlib import Path
from random import SystemRandom
from signal import SIGINT, default_int_handler, signal
from typing import Any

import gevent
from gevent.event import Event
from locust import HttpUser, LoadTestShape, argument_parser, events, log
from locust.env import Environment
from locust.rpc import Message
from locust.runners import (
    HEARTBEAT_INTERVAL,
    STATE_MISSING,
    STATE_RUNNING,
    STATE_SPAWNING,
    MasterRunner,
    Runner,
    WorkerRunner,
)

import options as load_options
import page
from access import Access
from record import Recorder, write
from shapes import USERS, Stage, stage_at
from summary import Report
from users import (
    REQUEST_TIMEOUT,
    UNANSWERED,
    ClosedLoopUser,
    EditorUser,
    OpenLoopUser,
    Run,
    served_model,
)
from workload import EDITOR, place

# Workers call this for every option whenever users come or leave, which took half a second.
argument_parser.default_args_dict = cache(argument_parser.default_args_dict)


@events.init_command_line_parser.add_listener
def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this load test."""
    load_options.add_to(parser)


class Shape(LoadTestShape):
    """Runs the stages of the chosen shape."""

    use_common_options = True  # number of users, ramp up and run time of the shape `users`

    def tick(self) -> tuple[int, float, list[type[HttpUser]]] | None:
        """Return number, spawn rate and class of the users, every second; None ends the run."""
        assert self.runner is not None  # noqa: S101 - Locust sets it before the first tick
        environment = self.runner.environment
        options = environment.parsed_options
        stages, ran = load_options.stages(options), self.get_run_time()
        ends = accumulate(stage.seconds for stage in stages)
        if (left := next((end - ran for end in ends if end > ran), math.inf)) < 1:
            gevent.sleep(left)  # as the next tick would come too late
            ran += left
        index = stage_at(stages, ran)
        most = options.number_of_requests or math.inf
        done = False
        if self.runner.state in (STATE_SPAWNING, STATE_RUNNING):
            run: Run = environment.load
            if run.recorder.ended is not None:  # no new stage while the last answers come
                return self.runner.shape_last_tick
            run.lost, gone = lost(self.runner, options.load_workers)
            done = run.recorder.requests >= most or (gone and most < math.inf)
            done = done or run.finished
        if index is None or done or ran >= (options.run_time or math.inf):
            return None
        users = stages[index].locust_users
        if stages[index].open_loop:  # each process has a share of the arrivals
            users = max(users, getattr(self.runner, "worker_count", 1))
        by_form = load_options.shape(options) == USERS and options.spawn_rate
        before = stages[index - 1].locust_users if index else 0
        rate = options.spawn_rate if by_form else max(users, before)  # all come or leave at once
        kind = OpenLoopUser if stages[index].open_loop else ClosedLoopUser
        return users, rate, [EditorUser if options.kind_of_prompt == EDITOR else kind]


# -- the start -------------------------------------------------------------------------------------


_complete = Event()  # set once this process's environment knows its runner


@events.init.add_listener
def set_up(environment: Environment, **_: Any) -> None:
    """Check the options and the API, and extend the page."""
    environment.load, options = None, environment.parsed_options
    # The page's form can set every option, and a master sends its options to the workers. By now
    # they may have replaced a worker's own.
    worker = isinstance(environment.runner, WorkerRunner)
    own = argument_parser.get_parser().parse_args() if worker else options
    environment.access, options.api_key = Access(own.api_key, own.host), ""
    _complete.set()
    if worker:
        environment.runner.register_message(STOP, finish)
        return
    if isinstance(environment.runner, MasterRunner):
        environment.runner.register_message(STOPPED, note)
    load_options.settle(options)
    try:
        load_options.check(options, options.expect_workers)
        if options.headless:  # with a page, the API may start later
            served_model(environment.host, environment.access)
    except ValueError as error:
        sys.exit(f"locust: {error}")
    if environment.web_ui:
        page.install(environment, lambda: report(environment))


# -- what is recorded ------------------------------------------------------------------------------

_begun: list[Environment] = []  # of this process: events between processes do not pass it


@events.test_start.add_listener
def begin(environment: Environment, **_: Any) -> None:
    """Start recording, in every process, before its first user starts.

    A worker gets its first users as soon as the master knows it. Its own constructor may not have
    returned by then, so this waits for the environment.
    """
    _complete.wait()
    options, runner = environment.parsed_options, environment.runner
    if isinstance(runner, WorkerRunner):  # the master has sent the list, with its options
        workers = options.load_workers
        index = place(runner.client_id, runner.worker_index, workers)
    else:
        index, workers = 0, [""]
        if isinstance(runner, MasterRunner):
            workers = [node.id for node in runner.clients.all if node.state != STATE_MISSING]
        options.load_workers, options.load_stop_timeout = workers, float(options.stop_timeout)
        options.load_number = getattr(options, "load_number", 0) + 1
        options.load_seed = options.seed or str(SystemRandom().randrange(10**9))
        options.load_stages = [list(astuple(stage)) for stage in load_options.stages(options)]
        options.load_started = time.time() - environment.shape_class.get_run_time()
    # A user that leaves during the run waits for its last answer, however long it takes.
    environment.stop_timeout = REQUEST_TIMEOUT
    stages = [Stage(*stage) for stage in options.load_stages]
    recorder = Recorder(stages, options.load_started)
    if isinstance(runner, WorkerRunner) and options.processes:
        # Ctrl-C reaches the master as well, which stops the workers and waits for their figures.
        signal(SIGINT, lambda *_: signal(SIGINT, default_int_handler))
    environment.load = Run(environment, recorder, index, workers)
    _begun[:] = [environment]
    if not isinstance(runner, MasterRunner):
        random.seed(f"{options.load_seed}:{index}")  # Locust chooses tasks with it
        with suppress(*UNANSWERED):  # the users try again, and count failures
            environment.load.prepare()


@events.test_stopping.add_listener
def end(environment: Environment, **_: Any) -> None:
    """Stop the clock and the workers; if all requests are sent, the clock ends with the last."""
    if environment.load is None:
        return  # the test never began
    options = environment.parsed_options
    environment.stop_timeout = options.load_stop_timeout
    recorder, most = environment.load.recorder, options.number_of_requests
    if isinstance(environment.runner, WorkerRunner) and options.processes:
        signal(SIGINT, default_int_handler)
    if recorder.ended is not None:
        return  # the master has told this worker already
    complete = environment.load.finished or (most and recorder.requests >= most)
    recorder.ended = max(t.last for t in recorder.tallies) if complete else time.time()
    if isinstance(environment.runner, MasterRunner):
        gather(environment)


@events.reset_stats.add_listener
def forget(**_: Any) -> None:
    """Start over when somebody presses Reset on the page."""
    for environment in _begun:
        environment.load.recorder.restart()


@events.report_to_master.add_listener
def hand_over(client_id: str, data: dict[str, Any], **_: Any) -> None:
    """Add a worker's results since its last report to the report."""
    for environment in _begun:
        run: Run = environment.load
        data["load"] = {"number": run.number, "finished": run.finished}
        data["load"]["stages"] = run.recorder.take()


@events.worker_report.add_listener
def take_over(client_id: str, data: dict[str, Any], **_: Any) -> None:
    """Add a worker's results to the master's."""
    for environment in _begun:
        found = data.get("load", {})
        if found.get("number") == environment.load.number:  # not of the previous run
            environment.load.recorder.add(found["stages"])
            if found["finished"]:
                environment.load.workers.discard(client_id)


# -- the end ---------------------------------------------------------------------------------------

# Additional messages. Without a page, Locust tells workers to quit and then reads for only half a
# second, so longer answers would be lost. With a page, the last figures would come up to three
# seconds after it says that the test has stopped.
STOP, STOPPED = "load-stop", "load-stopped"
STOP_SECONDS = 60.0  # as in Locust, in addition to the users' time for their last requests
_noted: set[str] = set()  # workers that have sent everything
_news = Event()


def gather(environment: Environment) -> None:
    """Stop all workers, and wait for their last results."""
    runner = environment.runner
    _noted.clear()
    runner.send_message(STOP, environment.load.recorder.ended)
    with gevent.Timeout(environment.stop_timeout + STOP_SECONDS, exception=False):
        while any(w.id not in _noted for w in runner.clients.all if w.state != STATE_MISSING):
            _news.clear()
            _news.wait(HEARTBEAT_INTERVAL)  # a worker may have gone missing


def lost(runner: Runner, workers: Sequence[str]) -> tuple[int, bool]:
    """The number of a run's workers that do not answer, and whether any of them is gone for good.

    With a worker, its results since the last report and its share of the requests are lost.
    """
    if not isinstance(runner, MasterRunner):
        return 0, False
    silent = [
        w for w in workers if w not in runner.clients or runner.clients[w].state == STATE_MISSING
    ]
    return len(silent), any(worker not in runner.clients for worker in silent)


def finish(environment: Environment, msg: Message, **_: Any) -> None:
    """Stop a worker's users, as the master has ended the run, and send the last results."""
    runner, data = environment.runner, dict[str, Any]()
    environment.load.recorder.ended = msg.data
    runner.stop()
    environment.events.report_to_master.fire(client_id=runner.client_id, data=data)
    runner.send_message("stats", data)
    runner.send_message(STOPPED)


def note(msg: Message, **_: Any) -> None:
    """Record that a worker has sent everything."""
    _noted.add(msg.node_id)
    _news.set()


def report(environment: Environment) -> Report | None:
    """The figures so far; None before the first test."""
    run: Run | None = environment.load
    if run is None:
        return None
    errors = sum(error["count"] for error in environment.runner.exceptions.values())
    return Report(run.recorder, run.options, run.host, errors, run.lost)


@events.quitting.add_listener
def judge(environment: Environment, **_: Any) -> None:
    """Print the results, write the report and set the exit status."""
    if isinstance(environment.runner, WorkerRunner):
        return
    found, options = report(environment), environment.parsed_options
    broken = found is None or log.unhandled_greenlet_exception
    if options.headless:
        environment.process_exit_code = 1 if broken else found.status
    if found is None:
        print("The load test ended before it began.")
        return
    if options.report:
        write(Path(options.report), found.data())
    if options.html_file and (html := Path(options.html_file)).is_file():
        page.append_to_file(html, found)
    print("", *found.lines(), sep="\n")
