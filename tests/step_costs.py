"""`python -m tests.step_costs`: what a step takes outside of ONNX Runtime.

The bundled pair decodes plainly, without HTTP, one request and eight at once. Microseconds of whole
steps and of the part before and after the session's run, medians of a few rounds in turns.
"""

from __future__ import annotations

import time
from itertools import count
from statistics import median
from typing import Any

import numpy as np

from bench.tools.machine import describe
from specops.config import Settings
from specops.engine.engine import Engine
from specops.request import GenerationRequest

PROMPT, STEPS, WARM_STEPS, ROUNDS = 100, 250, 20, 6
_ids = count()


class Stopwatch:
    """A session that notes the seconds of its last run."""

    def __init__(self, session: Any) -> None:
        self._session, self.seconds = session, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: Any) -> None:
        start = time.perf_counter()
        self._session.run_with_iobinding(binding)
        self.seconds = time.perf_counter() - start


def steps(engine: Engine, session: Stopwatch, requests: int) -> list[tuple[float, float]]:
    """Seconds of each step, and of its part outside of the session."""
    scheduler = engine.scheduler
    for _ in range(requests):
        number = next(_ids)
        prompt = np.random.default_rng(number).integers(1, engine.info.vocab_size, PROMPT)
        scheduler.add(
            GenerationRequest(
                request_id=str(number),
                prompt_tokens=tuple(prompt.tolist()),
                max_new_tokens=2 * (STEPS + WARM_STEPS),
                drafter="none",
                ignore_eos=True,
            )
        )
    for _ in range(WARM_STEPS):
        scheduler.step()
    found = []
    for _ in range(STEPS):
        start = time.perf_counter()
        scheduler.step()
        seconds = time.perf_counter() - start
        found.append((seconds, seconds - session.seconds))
    scheduler.cancel_all()
    while scheduler.busy:
        scheduler.step()
    return found


def main() -> None:
    """Print the table."""
    engine = Engine.load(Settings(model="demo", slots=8, prefix_cache="off"))
    target: Any = engine.scheduler.target
    session = target._session = Stopwatch(target._session)
    found: dict[int, list[tuple[float, float]]] = {1: [], 8: []}
    for _ in range(ROUNDS):
        for requests in found:
            found[requests] += steps(engine, session, requests)
    print(describe().line)
    for requests, seconds in found.items():
        whole, outside = (1e6 * median(part) for part in zip(*seconds, strict=True))
        print(f"{requests} at once: {outside:.0f} of {whole:.0f} us, {outside / whole:.0%}")


if __name__ == "__main__":
    main()
