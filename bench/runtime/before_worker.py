"""Times one checkout's engine step by step, in a separate process.

The interpreter decides which checkout's `specops` is measured. So this file uses only parts of the
project that are the same in every version: `Engine.load`, `scheduler.add`, `scheduler.step`.
"""

import time
from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from bench.tools.worker import serve
from specops.config import Settings
from specops.engine.engine import Engine
from specops.request import GenerationRequest
from specops.speculation.drafters.base import Draft, LookupDrafter

_PAST = 200  # tokens of the prompts before timed steps
_WARM_STEPS = 3


class Wrong(LookupDrafter):
    """Proposes the maximum number of draft tokens, hardly ever the right ones."""

    name = "wrong"

    def look_up(self, asked: Any, *before: Any) -> Any:
        """Propose tokens derived from the last one."""
        tokens, count, *_ = before or (asked.text, asked.max_draft)  # a slot first, until 0.1
        found = tuple((tokens[-1] + 7 * place) % 300 for place in range(1, count + 1))
        return Draft(found) if before else found


class Steps:
    """Times an engine's steps; see `bench.tools.worker`."""

    def load(self, settings: Mapping[str, Any]) -> None:
        """Load the engine. Settings that this checkout does not have are ignored."""
        names = {item.name for item in fields(Settings)}
        values = {
            name: Path(value) if name.endswith("_dir") else value
            for name, value in settings.items()
            if name in names
        }
        self.engine = Engine.load(replace(Settings(), **values))
        self.scheduler = self.engine.scheduler
        drafters = self.scheduler.drafters
        known = next(iter(drafters.values()))  # a chain of drafters since 0.2
        drafters["wrong"] = type(known)((Wrong(),)) if isinstance(known, tuple) else Wrong()
        self._numbers = count(1)

    def weight_bytes(self) -> int:
        """Bytes of weights that every token reads."""
        return self.engine.info.weight_bytes

    def steps(self, streams: int, draft_tokens: int, steps: int) -> list[float]:
        """Seconds of each step in which the streams decode.

        Args:
            streams: number of requests.
            draft_tokens: draft tokens that each request verifies in a step.
            steps: number of timed steps.
        """
        self._fill(streams, 4 * (steps + _WARM_STEPS) + 64, draft_tokens)
        seconds = []
        for _ in range(_WARM_STEPS + steps):
            start = time.perf_counter()
            self.scheduler.step()
            seconds.append(time.perf_counter() - start)
        self._clear()
        return seconds[_WARM_STEPS:]

    def prompt(self, tokens: int) -> list[float]:
        """Seconds from a prompt's arrival to its first token."""
        self._add(tokens, 1)
        start = time.perf_counter()
        while self.scheduler.busy:
            self.scheduler.step()
        return [time.perf_counter() - start]

    def mixed(self, streams: int, tokens: int, seconds: float) -> list[float]:
        """Seconds per token while prompts arrive one after the other, next to streams.

        Args:
            streams: number of requests that decode.
            tokens: tokens of a prompt.
            seconds: the measurement ends with the first prompt that is done after this time.
        """
        context = self.engine.info.context
        running = self._fill(streams, context)
        done = 0
        arriving = self._add(tokens, 1)
        start, over = time.perf_counter(), False
        while not over:
            for output in self.scheduler.step().outputs:
                if output.request_id in running:
                    done += len(output.pieces)
                if output.finish and output.request_id in running:
                    done += _PAST
                    running.remove(output.request_id)
                    running.add(self._add(_PAST, context))
                elif output.finish and output.request_id == arriving:
                    done += tokens
                    over = time.perf_counter() - start >= seconds
                    arriving = self._add(tokens, 1)
        passed = time.perf_counter() - start
        self._clear()
        return [passed / done]

    def _add(self, tokens: int, output: int, draft_tokens: int = 0) -> str:
        number = next(self._numbers)
        rng = np.random.default_rng(number)
        prompt = rng.integers(1, self.engine.info.vocab_size, tokens).tolist()
        request = GenerationRequest(
            request_id=str(number),
            prompt_tokens=tuple(prompt),
            max_new_tokens=output,
            drafter="wrong" if draft_tokens else "none",
            k_draft=draft_tokens,
            ignore_eos=True,
        )
        self.scheduler.add(self.engine.admit(request))
        return str(number)

    def _fill(self, streams: int, output: int, draft_tokens: int = 0) -> set[str]:
        """Start streams, run until each has its first token, and return their ids."""
        running = {self._add(_PAST, output, draft_tokens) for _ in range(streams)}
        begun: set[str] = set()
        while begun < running:
            outputs = self.scheduler.step().outputs
            begun |= {output.request_id for output in outputs if output.pieces}
        return running

    def _clear(self) -> None:
        self.scheduler.cancel_all()
        while self.scheduler.busy:
            self.scheduler.step()


if __name__ == "__main__":
    serve(Steps())
