"""Sides compute in turns, each while all others are idle."""

import math
import os
import subprocess
import sys

import pytest

from bench.tools.quiet import Case, DisturbedError, Turns, settle
from tests.waiting import wait

SPIN_UNTIL_TOLD = """
import sys, threading
told = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), told.set()), daemon=True).start()
print("spinning", flush=True)
while not told.is_set():
    pass
print("idle", flush=True)
sys.stdin.readline()
"""


def what_computes(pid: int) -> str:
    """Return what is said of a process that is not quiet; a busy machine runs it seldom."""
    try:
        settle(pid, timeout=0.0)
    except TimeoutError as error:
        return str(error)
    return ""


def test_a_process_that_spins_is_named_and_one_that_has_stopped_is_quiet() -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SPIN_UNTIL_TOLD]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout.readline() == "spinning\n"
            wait("it is named", lambda: str(process.pid) in what_computes(process.pid))
            process.stdin.write("stop\n")
            process.stdin.flush()
            assert process.stdout.readline() == "idle\n"
            settle(process.pid)
            assert process.poll() is None
        finally:
            process.kill()


class Side:
    """A side whose passes take `seconds`."""

    pid = os.getpid()

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


CASES = [
    Case("often", lambda side: [9.0, side.seconds, side.seconds]),
    Case("seldom", lambda side: [side.seconds], seldom=True),
]


def test_a_rounds_time_is_the_median_of_a_sides_passes_and_seldom_cases_have_fewer_rounds() -> None:
    turns = Turns(allowed=math.inf)
    turns.measure({"ours": Side(1.0), "fast": Side(2.0), "slow": Side(3.0)}, CASES, rounds=4)
    assert turns.ms["often"] == {"ours": [1000.0] * 4, "fast": [2000.0] * 4, "slow": [3000.0] * 4}
    assert turns.ms["seldom"]["ours"] == [1000.0] * 2


def test_rounds_are_given_up_if_others_always_compute() -> None:
    turns = Turns(allowed=-1.0)
    with pytest.raises(DisturbedError, match="other processes keep computing"):
        turns.measure({"ours": Side(1.0)}, CASES, rounds=1)
    assert turns.disturbed == 20
