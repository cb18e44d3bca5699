"""Requests in which something goes wrong, among others, which must get what they get alone.

Each faulty request carries where: a drafter, sampling, log-probabilities or detokenizing raises
when it comes to that request. Used by the tests for a moment and in full:
`python -m tests.faults --honest 4000 --faulty 1000`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from unittest.mock import patch

import numpy as np

from specops.config import Settings
from specops.engine import postprocessor
from specops.engine import sequence as engine_sequence
from specops.engine.engine import Engine
from specops.request import FinishReason, GenerationRequest, Output, SamplingParams
from specops.speculation.drafters.base import Drafter
from specops.text.text_stream import TextStream
from tests.leavers import alone, kinds

PLACES = 48  # requests at a time
DRAFTER = ("begin", "look_up", "backlog", "take_in", "propose", "release")
ALL = (*DRAFTER, "next_token", "verify", "logprob", "push", "flush")
_ids = count()


class FaultError(Exception):
    """What goes wrong."""


class _Sampling(SamplingParams):
    """Greedy; says where something is to go wrong."""

    where: str


class _Most(int):
    """A number of log-probabilities that goes wrong."""


class _FaultyText(TextStream):
    """Detokenizes, but for a stop string that names what is to fail."""

    def push(self, *args: Any, **kwargs: Any) -> Any:
        _fail_at("push", *self._stop)
        return super().push(*args, **kwargs)

    def flush(self) -> Any:
        _fail_at("flush", *self._stop)
        return super().flush()


class _FaultyDrafter:
    """Passes calls on, but for a client that is named after the method."""

    def __init__(self, drafter: Drafter, clients: dict[int, str]) -> None:
        self._drafter, self._clients = drafter, clients

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._drafter, name)
        if name not in DRAFTER:
            return found

        def call(first: Any, *rest: Any) -> Any:
            if name == "begin":
                self._clients[first] = rest[-1]
            slots = [item.slot for item in first] if name == "propose" else [first]
            for slot in slots:
                if name != "release":
                    _fail_at(name, self._clients[slot])
            answer = found(first, *rest)
            if name == "release":
                _fail_at(name, self._clients[first])
            return answer

        return call


def _fail_at(place: str, *named: str) -> None:
    if f"fault {place}" in named:
        raise FaultError(place)


def _sampled(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        for item in (*args, *kwargs.values()):
            if isinstance(item, _Sampling):
                _fail_at(name, f"fault {item.where}")
            if isinstance(item, _Most):
                raise FaultError("logprob")
        return function(*args, **kwargs)

    return call


@contextmanager
def faults(engine: Engine) -> Iterator[None]:
    """Let things go wrong for requests that were made by `faulty`."""
    drafters: Any = engine.scheduler.drafters
    before, clients = dict(drafters), dict[int, str]()
    with ExitStack() as patched:
        for module, name in (
            *((postprocessor, "verify"), (engine_sequence, "next_token")),
            (engine_sequence, "logprob"),
        ):
            wrapped = _sampled(name, getattr(module, name))
            patched.enter_context(patch.object(module, name, wrapped))
        patched.enter_context(patch.object(engine_sequence, "TextStream", _FaultyText))
        drafters.update({name: _FaultyDrafter(item, clients) for name, item in before.items()})
        yield
    drafters.update(before)


def faulty(request: GenerationRequest, place: str) -> GenerationRequest:
    """The request with something to go wrong at a place, as far as it gets there."""
    if place in DRAFTER:
        model = place in ("backlog", "take_in", "propose")
        drafter = "draft" if model else request.drafter
        return replace(request, client=f"fault {place}", drafter=drafter, k_draft=4, adaptive=False)
    if place in ("push", "flush"):
        return replace(request, stop=(f"fault {place}",))
    if place == "logprob":
        return replace(request, logprobs=_Most(2))
    sampling = _Sampling()
    object.__setattr__(sampling, "where", place)
    return replace(request, sampling=sampling)


@dataclass
class Tally:
    """What became of the requests: those that got their own output, and faults by place."""

    right: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    escaped: Counter[str] = field(default_factory=Counter)  # faults that were never reached


def play(
    engine: Engine, requests: Sequence[GenerationRequest], honest: int, wrong: int, seed: int = 0
) -> Tally:
    """Mix so many honest requests with so many faulty ones.

    Raises:
        AssertionError: an honest request got another output than alone, a faulty one ended
            otherwise than by its own fault, or something was not freed.
    """
    rng = np.random.default_rng(seed)
    expected = [alone(engine, request) for request in requests]
    places = [""] * honest + [ALL[index % len(ALL)] for index in range(wrong)]
    rng.shuffle(places)
    coming = iter(places)
    scheduler, tally = engine.scheduler, Tally()
    here: dict[str, tuple[str, tuple[int, ...], list[int]]] = {}
    more = True
    with faults(engine):
        while more or here:
            while more and len(here) < PLACES:
                place = next(coming, None)
                if more := place is not None:
                    which = int(rng.integers(len(requests)))
                    request = replace(requests[which], request_id=f"fault {next(_ids)}")
                    scheduler.add(faulty(request, place) if place else request)
                    here[request.request_id] = (place, expected[which], [])
            for output in scheduler.step().outputs:
                _take(tally, here, output)
    assert not scheduler.busy
    assert scheduler.target.cache.tokens == scheduler.target.cache.used_blocks == 0
    return tally


def _take(
    tally: Tally, here: dict[str, tuple[str, tuple[int, ...], list[int]]], output: Output
) -> None:
    place, expected, got = here[output.request_id]
    got += [piece.token for piece in output.pieces]
    sampled_otherwise = place in ("next_token", "verify")
    assert sampled_otherwise or tuple(got) == expected[: len(got)], place
    if output.finish is None:
        return
    del here[output.request_id]
    if output.finish is FinishReason.ERROR:
        assert output.error == place
        tally.failed[place] += 1
    elif place:
        tally.escaped[place] += 1
    else:
        assert tuple(got) == expected
        tally.right += 1


def main() -> None:
    """The full run, on the demo pair."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--honest", type=int, default=4000)
    parser.add_argument("--faulty", type=int, default=1000)
    options = parser.parse_args()
    settings = Settings(model="demo", max_inter_token_latency=0.05)
    engine = Engine.load(settings)
    lines = (settings.models_dir / "demo" / "heldout.jsonl").read_text(encoding="utf-8")
    prompts = [json.loads(line)["prompt"] for line in lines.splitlines()]
    tally = play(engine, kinds(engine, prompts, 60), options.honest, options.faulty)
    print(f"{tally.right} requests got what they get alone")
    print(f"{tally.failed.total()} ended in their own error: {dict(sorted(tally.failed.items()))}")
    print(f"{tally.escaped.total()} never came to theirs: {dict(sorted(tally.escaped.items()))}")


if __name__ == "__main__":
    main()
