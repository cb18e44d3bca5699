"""A soak finds growth, leftovers, slowness and different answers."""

import json
import time
from dataclasses import replace

import pytest

from bench.serving.load import Ask
from tests.loopback import Handler, listening
from tests.soak.load import GENERATE, Load
from tests.soak.watch import Course, Sample, Window

pytestmark = pytest.mark.anyio
REST = Sample(0, 100_000_000, descriptors=10, threads=6)


def course(minutes: float, growth: float = 0.0, last: float = 1.0, others: float = 0.0) -> Course:
    """A soak in which memory grows by so many MB an hour and the last window is slower."""

    def sample(moment: float) -> Sample:
        return replace(REST, moment=moment, memory=int(1e8 + growth * 1e6 * moment / 3600))

    length = minutes * 10
    return Course(
        REST,
        REST,
        [
            Window(
                [0.1 * (last if number == 5 else 1)] * 30,
                cpu=1,
                others=others,
                samples=[sample(number * length + part * length / 10) for part in range(10)],
            )
            for number in range(6)
        ],
    )


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (course(60, growth=0.9), ""),
        (course(60, growth=1.1), "memory grows by 1.10 MB an hour, more than 1.00"),
        (course(2, growth=110), ""),  # less than a step of the allocator
        (course(2, growth=140), "memory grows by 140.00 MB an hour"),
        (course(60, last=1.1), ""),
        (course(60, last=1.2), "the 95th percentile of the last window is 20% longer"),
        (course(2, last=1.2), ""),
        (course(60, others=1.7), ""),
        (course(60, last=1.2, others=1.7), "other programs kept 1.7 cores busy"),
        (replace(course(2), after=replace(REST, descriptors=11)), "11 descriptors at the end, 10"),
        (replace(course(2), after=replace(REST, threads=7)), "7 threads at the end, 6"),
        (replace(course(2), problems=["x"] * 12), "and 2 more clients"),
    ],
)
def test_each_fault_of_a_server_is_named(seen: Course, reason: str) -> None:
    found = seen.reasons()
    assert found[-1].startswith(reason) if reason else not found


@pytest.mark.parametrize("broken", ["", "text", "stream", "status"])
async def test_a_different_answer_is_a_problem(broken: str) -> None:
    class Answers(Handler):
        def do_POST(self) -> None:
            stays = self.body()["stream"]
            text = "b" if broken == "text" and stays else "a"
            answer = {"generated_text": text, "finish_reason": "length"}
            if not stays:
                self.reply(200, answer)
                return
            end = "" if broken == "stream" else "data: [DONE]\n\n"
            events = f"data: {json.dumps(answer)}\n\n{end}".encode()
            status = 500 if broken == "status" else 200
            self.reply(status, events, {"content-type": "text/event-stream"})

    with listening(Answers) as port:
        load = Load(port, [Ask(GENERATE, {"prompt": "a", "stream": True})], arrivals=1)
        await load.record()
        await load.see("right", lambda: load.stay(load.requests[0]))
    assert load.ended == {"wrong" if broken else "right": 1}
    assert bool(load.problems) == bool(broken)


@pytest.mark.parametrize(
    ("ending", "ready", "excused"),
    [
        (None, None, False),  # no server was told to end
        (-5.0, None, True),  # it ended before the client came, and no other was there yet
        (-5.0, 5.0, True),  # the next one was ready after the client came
        (-5.0, -4.0, False),  # it was ready before
        (5.0, 9.0, False),  # the client came long before the end
    ],
)
async def test_a_client_comes_again_only_if_it_met_no_server(
    ending: float | None, ready: float | None, excused: bool
) -> None:
    """`ending` and `ready` are seconds after the client's first visit."""
    load, visits = Load(0, [], arrivals=1), 0

    async def visit() -> None:
        nonlocal visits
        visits += 1
        now = time.monotonic()
        load.ending = None if ending is None else now + ending
        load.ready = None if ready is None else now + ready
        if visits == 1:
            raise ConnectionRefusedError("nobody listens")

    await load.see("right", visit)
    assert load.ended["wrong"] == (not excused)
    assert load.ended["right"] == excused
