"""The rules of the clock: every side is asked for the same passes, with the same past."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from bench.peers import protocol
from bench.peers.protocol import Timed


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

    def complete(self, prompts: list[list[int]], output: int) -> list[list[int]]:
        return [prompt[:1] * output for prompt in prompts]


@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
def test_the_timed_passes_have_the_wanted_past_on_average(tokens: int) -> None:
    side = Recorder()
    seconds = Timed(side).measure(1, tokens, past=200, passes=5)["seconds"]
    timed = side.ran[1:]  # the first pass allocates
    assert len(seconds) == len(timed) == 5
    assert sum(past for _, _, past in timed) / 5 == 200
    assert {(rows, width) for rows, width, _ in timed} == {(1, tokens)}


def test_every_pass_that_is_prepared_runs() -> None:
    side = Recorder()
    Timed(side).measure(4, 1, past=50, passes=3)
    assert side.ran == side.prepared


def test_a_prefill_starts_from_nothing_every_time() -> None:
    side = Recorder()
    timed = Timed(side)
    seconds = [*timed.prefill(range(64))["seconds"], *timed.prefill(range(64))["seconds"]]
    assert side.ran == [(1, 64, 0), (1, 64, 0)]
    assert all(value > 0 for value in seconds)


def test_logits_are_those_of_the_texts_last_token() -> None:
    assert Timed(Recorder()).logits([1, 2, 3]) == {"logits": [3.0]}


def test_a_side_is_asked_for_whole_requests() -> None:
    answered = Timed(Recorder()).complete([[5, 6], [7, 8]], output=3)
    assert answered["seconds"] > 0
    assert answered["tokens"] == [[5, 5, 5], [7, 7, 7]]


def test_prompts_are_token_ids_without_the_special_first_one() -> None:
    ids = protocol.prompt(500, 320)
    assert len(ids) == 500
    assert min(ids) >= 1
    assert max(ids) < 320
    assert ids == protocol.prompt(600, 320)[:500]
