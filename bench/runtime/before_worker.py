"""One checkout's engine in a process of its own, timed step by step.

The interpreter decides whose `specops` is measured, so nothing of the project but the engine and
its scheduler is used, and those as they have been in every version: `Engine.load`, `scheduler.add`,
`scheduler.step`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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

_PAST = 200  # tokens of a prompt before steps are timed
_WARM_STEPS = 3


class Wrong(LookupDrafter):
    """Proposes as many tokens as it is asked for, hardly ever the right ones."""

    name = "wrong"

    def look_up(self, slot: int, tokens: Sequence[int], count: int, least: float = 0.0) -> Draft:
        """The same tokens again and again."""
        return Draft(tuple((tokens[-1] + 7 * place) % 300 for place in range(1, count + 1)))


class Worker:
    """Obeys the orders below."""

    def __init__(self) -> None:
        self._ids = count()
        self._seeds = count(1)

    def load(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Load the engine. Settings by name, those that this checkout has; folders are text."""
        names = {item.name for item in fields(Settings)}
        values = {
            name: Path(value) if name.endswith("_dir") else value
            for name, value in settings.items()
            if name in names
        }
        self.engine = Engine.load(replace(Settings(), **values))
        self.scheduler = self.engine.scheduler
        self.scheduler.drafters["wrong"] = Wrong()
        return {"kernels": str(self.engine.info.kernels)}

    def steps(self, streams: int, draft_tokens: int, steps: int) -> dict[str, Any]:
        """Seconds of each step in which so many requests decode, or verify so many draft tokens."""
        for _ in range(streams):
            self._add(_PAST, 4 * (steps + _WARM_STEPS) + 64, draft_tokens)
        self._until_first_tokens(streams)
        seconds = []
        for number in range(-_WARM_STEPS, steps):
            start = time.perf_counter()
            self.scheduler.step()
            if number >= 0:
                seconds.append(time.perf_counter() - start)
        self._clear()
        return {"seconds": seconds}

    def prompt(self, tokens: int) -> dict[str, Any]:
        """Seconds from a prompt's arrival to its first token."""
        self._add(tokens, 1)
        start = time.perf_counter()
        while self.scheduler.busy:
            self.scheduler.step()
        return {"seconds": [time.perf_counter() - start]}

    def mixed(self, streams: int, tokens: int, seconds: float) -> dict[str, Any]:
        """Seconds by token of prompts that come all the time, and of streams beside them.

        Ends with the first prompt that is done after so many seconds.
        """
        context = self.engine.info.context
        running = {self._add(_PAST, context) for _ in range(streams)}
        self._until_first_tokens(streams)
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
        return {"seconds": [passed / done]}

    def _add(self, tokens: int, output: int, draft_tokens: int = 0) -> str:
        name = str(next(self._ids))
        rng = np.random.default_rng(next(self._seeds))
        prompt = rng.integers(1, self.engine.info.vocab_size, tokens).tolist()
        request = GenerationRequest(
            request_id=name,
            prompt_tokens=tuple(prompt),
            max_new_tokens=output,
            drafter="wrong" if draft_tokens else "none",
            k_draft=draft_tokens,
            ignore_eos=True,
        )
        self.scheduler.add(self.engine.admit(request))
        return name

    def _until_first_tokens(self, requests: int) -> None:
        begun: set[str] = set()
        while len(begun) < requests:
            outputs = self.scheduler.step().outputs
            begun |= {output.request_id for output in outputs if output.pieces}

    def _clear(self) -> None:
        self.scheduler.cancel_all()
        while self.scheduler.busy:
            self.scheduler.step()


if __name__ == "__main__":
    serve(Worker())
