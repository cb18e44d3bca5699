"""`python -m tests.step_costs [--http]`: what a step takes outside of ONNX Runtime.

The bundled pair decodes plainly, without HTTP, one request and eight at once: microseconds of whole
steps, and of the thread's own time before and after the session's run. With `--http` it is asked by
streams, plainly and with its drafters: tokens per second, and microseconds of the event loop for
each token. All are medians of a few rounds in turns.
"""

import argparse
import asyncio
import time
from collections import defaultdict
from itertools import count
from statistics import median, quantiles
from typing import Any

import numpy as np

from bench.prompts import code
from bench.serving.load import Ask, burst, span
from bench.serving.server import environment, serving
from bench.tools.machine import describe
from bench.tools.quiet import main_thread_seconds
from specops.config import Settings
from specops.engine.engine import Engine
from specops.request import GenerationRequest

PROMPT, STEPS, WARM_STEPS, ROUNDS = 100, 250, 20, 6
CLIENTS, TOKENS, HTTP_ROUNDS = (1, 4, 8), 600, 10
SETTINGS = Settings(model="demo", slots=8, prefix_cache="off")
_ids = count()


class Stopwatch:
    """A session that notes its thread's seconds in its last run."""

    def __init__(self, session: Any) -> None:
        self._session, self.seconds = session, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: Any) -> None:
        start = time.thread_time()
        self._session.run_with_iobinding(binding)
        self.seconds = time.thread_time() - start


def steps(engine: Engine, session: Stopwatch, requests: int) -> tuple[float, float]:
    """Microseconds of a step, and of its thread outside of the session; other processes only add
    to them, so these are those of the fourth that took the least."""
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
    whole, outside = [], []
    for _ in range(STEPS):
        start, own = time.perf_counter(), time.thread_time()
        scheduler.step()
        outside.append(time.thread_time() - own - session.seconds)
        whole.append(time.perf_counter() - start)
    scheduler.cancel_all()
    while scheduler.busy:
        scheduler.step()
    return 1e6 * quantiles(whole)[0], 1e6 * quantiles(outside)[0]


def direct() -> None:
    """Print what the engine takes."""
    engine = Engine.load(SETTINGS)
    target: Any = engine.scheduler.target
    session = target._session = Stopwatch(target._session)
    found = defaultdict(list)
    for _ in range(ROUNDS):
        for requests in (1, 8):
            found[requests].append(steps(engine, session, requests))
    for requests, microseconds in found.items():
        whole, outside = map(median, zip(*microseconds, strict=True))
        print(f"{requests} at once: {outside:.1f} of {whole:.0f} us, {outside / whole:.0%}")


def over_http() -> None:
    """Print what streams get."""
    prompts = [prompt.text for prompt in code(max(CLIENTS))]
    with serving(environment(SETTINGS)) as server:
        found = defaultdict(list)
        for _ in range(1 + HTTP_ROUNDS):
            for drafter in ("none", None):
                for clients in CLIENTS:
                    body = {"max_new_tokens": TOKENS, "ignore_eos": True, "stream": True}
                    body |= {} if drafter is None else {"drafter": drafter}
                    asks = [Ask("/generate", body | {"prompt": text}) for text in prompts[:clients]]
                    loop = main_thread_seconds(server.pid)
                    answers = asyncio.run(burst(server.port, asks))
                    loop = main_thread_seconds(server.pid) - loop
                    assert all(answer.complete for answer in answers)
                    tokens = clients * TOKENS
                    found[drafter, clients].append((tokens / span(answers), 1e6 * loop / tokens))
    for (drafter, clients), rounds in found.items():
        rate, loop = map(median, zip(*rounds[1:], strict=True))
        print(
            f"{clients} streams, {'plain' if drafter else 'default'}: {rate:.0f} tokens a second, "
            f"{loop:.1f} us of the event loop a token"
        )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http", action="store_true")
    print(describe().line)
    (over_http if parser.parse_args().http else direct)()


if __name__ == "__main__":
    main()
