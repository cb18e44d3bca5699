"""The rules of the clock: every side is asked for the same passes, with the same past."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence

import pytest

from bench.peers import protocol
from bench.tools.worker import serve_lines


class Recorder:
    """A side that writes down what it is asked for."""

    def __init__(self) -> None:
        self.length = 0
        self.prepared: list[tuple[int, int, int]] = []  # rows, tokens, what each row held before
        self.ran: list[tuple[int, int, int]] = []

    def load(self, model: str, *, threads: int, rows: int, capacity: int) -> str:
        return f"{model} {threads} {rows} {capacity}"

    def hold(self, rows: int, length: int) -> None:
        self.length = length

    def step(self, rows: int, tokens: int) -> Callable[[], object]:
        asked = (rows, tokens, self.length)
        self.prepared.append(asked)
        self.length += tokens
        return lambda: self.ran.append(asked)

    def prefill(self, prompt: Sequence[int]) -> Callable[[], object]:
        return self.step(1, len(prompt))

    def logits(self) -> list[float]:
        return [float(self.length)]


@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
def test_the_timed_passes_have_the_wanted_past_on_average(tokens: int) -> None:
    side = Recorder()
    seconds = protocol.measure(side, rows=1, tokens=tokens, past=200, passes=5)
    timed = side.ran[1:]  # the first pass allocates
    assert len(seconds) == len(timed) == 5
    assert sum(past for _, _, past in timed) / 5 == 200
    assert {(rows, width) for rows, width, _ in timed} == {(1, tokens)}


def test_every_pass_that_is_prepared_runs() -> None:
    side = Recorder()
    protocol.measure(side, rows=4, tokens=1, past=50, passes=3)
    assert side.ran == side.prepared


def test_a_prefill_starts_from_nothing_every_time() -> None:
    side = Recorder()
    seconds = protocol.measure_prefill(side, range(64), passes=2)
    assert side.ran == [(1, 64, 0), (1, 64, 0)]
    assert all(value > 0 for value in seconds)


def test_prompts_are_token_ids_without_the_special_first_one() -> None:
    ids = protocol.prompt(500, 320)
    assert len(ids) == 500
    assert min(ids) >= 1
    assert max(ids) < 320
    assert ids == protocol.prompt(600, 320)[:500]


def test_requests_and_answers_are_lines_of_json() -> None:
    requests = [
        {"do": "load", "model": "m", "threads": 2, "rows": 3, "capacity": 9},
        {"do": "measure", "rows": 1, "tokens": 2, "past": 20, "passes": 3},
        {"do": "prefill", "tokens": [1, 2, 3], "passes": 1},
        {"do": "logits", "tokens": [1, 2, 3]},
    ]
    answers = io.StringIO()
    lines = io.StringIO("".join(json.dumps(request) + "\n" for request in requests))
    side = Recorder()
    serve_lines(lambda request: protocol.answer(side, request), lines, answers)
    loaded, measured, prefilled, logits = map(json.loads, answers.getvalue().splitlines())
    assert loaded == {"runs_on": "m 2 3 9"}
    assert len(measured["seconds"]) == 3
    assert len(prefilled["seconds"]) == 1
    assert logits == {"logits": [3.0]}


def test_what_nobody_can_do_is_refused() -> None:
    with pytest.raises(ValueError, match="'dance' is nothing that can be done"):
        protocol.answer(Recorder(), {"do": "dance"})
