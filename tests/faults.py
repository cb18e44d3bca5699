"""Requests that fail inside the engine, among others, which must get the same tokens as alone.

Each faulty request says where it fails: sampling, log-probabilities or detokenizing raises an error
for that request. Tests run it for a moment. The full run is
`python -m tests.faults --honest 4000 --faulty 1000`.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from unittest.mock import patch

import numpy as np

from specops.config import Settings
from specops.engine import request_state, scheduler
from specops.engine.engine import Engine
from specops.request import FinishReason, GenerationRequest, Output, SamplingParams
from specops.text.text_stream import TextStream
from tests.leavers import alone, heldout, kinds

AT_ONCE = 48  # requests at a time
ALL = ("next_token", "verify", "logprob", "push", "flush")
_ids = count()


class FaultError(Exception):
    """The error that is raised on purpose."""


class _Sampling(SamplingParams):
    """Sampling that says where it has to fail."""

    where: str


class _Most(int):
    """A number of log-probabilities that fails."""


class _FaultyText(TextStream):
    """Detokenizes; fails if a stop string names the method."""

    def push(self, *args: Any, **kwargs: Any) -> Any:
        _fail_at("push", *self._stop)
        return super().push(*args, **kwargs)

    def flush(self) -> Any:
        _fail_at("flush", *self._stop)
        return super().flush()


def _fail_at(where: str, *named: str) -> None:
    if f"fault {where}" in named:
        raise FaultError(where)


def _sampled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`verify`, which chooses a token where there is no draft, or `logprob`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        for item in (*args, *kwargs.values()):
            if isinstance(item, _Sampling):
                _fail_at("verify" if args[1] else "next_token", f"fault {item.where}")
            if isinstance(item, _Most):
                raise FaultError("logprob")
        return function(*args, **kwargs)

    return call


@contextmanager
def faults() -> Iterator[None]:
    """Make the requests of `faulty` fail within the block."""
    with ExitStack() as patched:
        for module, name in ((scheduler, "verify"), (request_state, "logprob")):
            wrapped = _sampled(getattr(module, name))
            patched.enter_context(patch.object(module, name, wrapped))
        patched.enter_context(patch.object(request_state, "TextStream", _FaultyText))
        yield


def faulty(request: GenerationRequest, where: str) -> GenerationRequest:
    """Return the request, changed so that it fails in this function, if it gets there."""
    if where in ("push", "flush"):
        return replace(request, stop=(f"fault {where}",))
    if where == "logprob":
        return replace(request, logprobs=_Most(2))
    # Where all requests of a pass are greedy, their draft tokens are compared without `verify`.
    verified = where == "verify"
    sampling = _Sampling(temperature=1.0, seed=1) if verified else _Sampling()
    object.__setattr__(sampling, "where", where)
    drafts = {"drafter": "draft", "k_draft": 4, "adaptive": False} if verified else {}
    return replace(request, sampling=sampling, **drafts)  # type: ignore[arg-type]


@dataclass
class Tally:
    """How the requests ended: the right ones, and the faulty ones by the function that failed."""

    right: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    escaped: Counter[str] = field(default_factory=Counter)  # these never reached their fault


def play(
    engine: Engine, requests: Sequence[GenerationRequest], honest: int, wrong: int, seed: int = 0
) -> Tally:
    """Mix so many honest requests with so many faulty ones.

    Raises:
        AssertionError: an honest request got other tokens than alone, a faulty one ended with
            another error than its own, or something was not freed.
    """
    rng = np.random.default_rng(seed)
    expected = [alone(engine, request) for request in requests]
    faults_at = [""] * honest + [ALL[index % len(ALL)] for index in range(wrong)]
    rng.shuffle(faults_at)
    coming = iter(faults_at)
    scheduler, tally = engine.scheduler, Tally()
    here: dict[str, tuple[str, tuple[int, ...], list[int]]] = {}
    more = True
    with faults():
        while more or here:
            while more and len(here) < AT_ONCE:
                where = next(coming, None)
                if more := where is not None:
                    which = int(rng.integers(len(requests)))
                    request = replace(requests[which], request_id=f"fault {next(_ids)}")
                    scheduler.add(faulty(request, where) if where else request)
                    here[request.request_id] = (where, expected[which], [])
            for output in scheduler.step().outputs:
                _take(tally, here, output)
    assert not scheduler.busy
    assert scheduler.target.cache.tokens == scheduler.target.cache.used_blocks == 0
    return tally


def _take(
    tally: Tally, here: dict[str, tuple[str, tuple[int, ...], list[int]]], output: Output
) -> None:
    where, expected, got = here[output.request_id]
    got += [piece.token for piece in output.pieces]
    sampled_otherwise = where in ("next_token", "verify")
    assert sampled_otherwise or tuple(got) == expected[: len(got)], where
    if output.finish is None:
        return
    del here[output.request_id]
    if output.finish is FinishReason.ERROR:
        assert output.error == where
        tally.failed[where] += 1
    elif where:
        tally.escaped[where] += 1
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
    requests = kinds(engine, heldout(settings), 60)
    tally = play(engine, requests, options.honest, options.faulty)
    print(f"{tally.right} requests got what they get alone")
    print(f"{tally.failed.total()} ended in their own error: {dict(sorted(tally.failed.items()))}")
    print(f"{tally.escaped.total()} never came to theirs: {dict(sorted(tally.escaped.items()))}")


if __name__ == "__main__":
    main()
