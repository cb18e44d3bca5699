"""What the processes under comparison answer: a line of JSON for a line of JSON.

Runs in the peers' environment too, so nothing but the standard library. Every side takes its times
with the code below, around the same passes: none is measured in a way of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from bench.tools.worker import serve_with

Pass = Callable[[], object]


@runtime_checkable
class Side(Protocol):
    """One way to run the model. A row is a sequence with keys and values of its own."""

    def load(self, model: str, *, threads: int, rows: int, capacity: int) -> str:
        """Load a model for `rows` rows of `capacity` tokens; return what it runs on, in words."""

    def hold(self, rows: int, length: int) -> None:
        """Make each of the first rows hold exactly `length` tokens."""

    def step(self, rows: int, tokens: int) -> Pass:
        """Prepare a pass of `tokens` tokens in each of the first rows, with logits for all."""

    def prefill(self, prompt: Sequence[int]) -> Pass:
        """Prepare the passes of a prompt in row 0, which is empty, with its last logits."""

    def logits(self) -> list[float]:
        """[V] logits of the last token of the last pass."""


@runtime_checkable
class Serving(Protocol):
    """A peer's own way to answer several requests at once."""

    def load(self, model: str, *, threads: int, rows: int, capacity: int) -> str:
        """See `Side`."""

    def complete(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        """Generate `output` tokens, the likeliest each time, for prompts that arrive at once."""


@runtime_checkable
class Scoring(Protocol):
    """A side that shows what it makes of every token of a text."""

    def load(self, model: str, *, threads: int, rows: int, capacity: int) -> str:
        """See `Side`."""

    def score(self, tokens: Sequence[int]) -> Any:
        """Logits of a text's tokens, an array [S, V] of float32."""


def prompt(tokens: int, vocab: int) -> list[int]:
    """Token ids without a pattern, the same on every side."""
    return [1 + index * 7919 % (vocab - 1) for index in range(tokens)]


def measure(side: Side, rows: int, tokens: int, past: int, passes: int) -> list[float]:
    """Time passes that follow each other as in decoding, with `past` tokens held on average.

    A first pass is not counted: what it allocates, the later ones have. Returns seconds per pass.
    """
    side.hold(rows, past - tokens * (passes // 2 + 1))
    _timed(side.step(rows, tokens))
    return [_timed(side.step(rows, tokens)) for _ in range(passes)]


def measure_prefill(side: Side, tokens: Sequence[int], passes: int) -> list[float]:
    """Time whole prompts, each from an empty row to its last token's logits, in seconds."""
    seconds = []
    for _ in range(passes):
        side.hold(1, 0)
        seconds.append(_timed(side.prefill(tokens)))
    return seconds


def _timed(run: Pass) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def answer(side: Side | Serving | Scoring, request: dict[str, Any]) -> dict[str, Any]:
    """Do what a request asks for."""
    values = dict(request)
    match values.pop("do", None):
        case "load":
            return {"runs_on": side.load(values.pop("model"), **values)}
        case "measure" if isinstance(side, Side):
            return {"seconds": measure(side, **values)}
        case "prefill" if isinstance(side, Side):
            return {"seconds": measure_prefill(side, **values)}
        case "logits" if isinstance(side, Side):
            side.hold(1, 0)
            side.prefill(values["tokens"])()
            return {"logits": side.logits()}
        case "complete" if isinstance(side, Serving):
            start = time.perf_counter()
            tokens = side.complete(**values)
            return {"seconds": time.perf_counter() - start, "tokens": tokens}
        case "score" if isinstance(side, Scoring):
            with open(values["file"], "wb") as file:
                for tokens, first in values["texts"]:
                    file.write(memoryview(side.score(tokens)[first:]).cast("B"))
            return {}
        case unknown:
            raise ValueError(f"{unknown!r} is nothing that can be done")


def serve(side: Side | Serving | Scoring) -> None:
    """Answer the requests on standard input until it ends."""
    serve_with(lambda request: answer(side, request))
