"""Requests that fail inside the engine, among others, which must get the same tokens as alone.

Each faulty request says where it fails: sampling, log-probabilities or detokenizing raises an error
for that request.
"""

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
from specops.engine.engine import NO_DRAFTER, Engine
from specops.request import FinishReason, GenerationRequest, Output, SamplingParams
from specops.runtime.kvcache.prefix_cache import PrefixSharing
from specops.text.text_stream import TextStream
from training.corpus import read_prompts

AT_ONCE = 48  # requests at a time
ALL = ("next_token", "verify", "logprob", "push", "flush")
_ids = count()


def heldout(settings: Settings) -> list[str]:
    """Return the prompts that the demo pair was not trained on."""
    return read_prompts(settings.models_dir / "demo")


def kinds(
    engine: Engine, prompts: list[str], number: int, *, longest: int = 60
) -> list[GenerationRequest]:
    """Return different requests, with answers of fewer tokens than `longest`; some begin alike."""
    rng = np.random.default_rng(0)
    drafters = list(engine.info.drafters)
    made = []
    for index in range(number):
        tokens = engine.encode(prompts[index % len(prompts)])
        beginning = engine.encode(prompts[index % 3])[:60]
        made.append(
            GenerationRequest(
                request_id="",
                prompt_tokens=(beginning + tokens)[: int(rng.integers(20, 300))],
                max_new_tokens=int(rng.integers(4, longest)),
                sampling=SamplingParams(0.8, seed=index) if index % 4 == 3 else SamplingParams(),
                drafter=drafters[index % len(drafters)],
                k_draft=4,
                adaptive=index % 5 != 0,
                ignore_eos=True,
            )
        )
    return made


def alone(engine: Engine, request: GenerationRequest) -> tuple[int, ...]:
    """Return the tokens of plain decoding without other requests, before or beside it."""
    cache = engine.scheduler.target.cache
    before, cache.reuse = cache.reuse, PrefixSharing.OFF
    request = replace(request, request_id=f"alone {next(_ids)}", drafter=NO_DRAFTER)
    found = [piece.token for output in engine.generate(request) for piece in output.pieces]
    cache.reuse = before
    return tuple(found)


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
