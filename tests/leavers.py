"""Clients that leave an engine at random moments; the clients that stay must not notice."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from specops.config import Settings
from specops.engine.engine import NO_DRAFTER, Engine
from specops.request import FinishReason, GenerationRequest, Output, SamplingParams
from specops.runtime.kvcache.prefix_cache import PrefixSharing
from training.corpus import read_prompts

AT_ONCE = 64  # clients
LEAVING = 0.5  # share of them that leave before their end
_ids = count()


@dataclass(slots=True)
class Client:
    """A client that waits for an answer.

    `expected` has the tokens of plain decoding without other requests. `patience` is the number of
    steps after which the client leaves, counted from its arrival, or from its slot if `settled`.
    """

    request: GenerationRequest
    expected: tuple[int, ...]
    patience: float
    settled: bool = False
    tokens: list[int] = field(default_factory=list)
    left_in: str = ""


@dataclass(slots=True)
class Tally:
    """How the requests ended."""

    stayed: int = 0
    left: Counter[str] = field(default_factory=Counter)  # clients, by their phase
    wasted_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0


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


def play(
    engine: Engine,
    requests: list[GenerationRequest],
    go_on: Callable[[], bool],
    *,
    seed: int = 0,
    at_once: int = AT_ONCE,
) -> Tally:
    """Let clients come and leave while `go_on()` is true, then let the rest finish.

    Raises:
        AssertionError: a request got other tokens than alone, or its slot was not freed.
    """
    rng = np.random.default_rng(seed)
    scheduler = engine.scheduler
    texts = [alone(engine, request) for request in requests]
    clients: dict[str, Client] = {}
    tally = Tally()
    while (coming := go_on()) or clients:
        while coming and len(clients) < at_once:
            which = int(rng.integers(len(requests)))
            name = str(next(_ids))
            request = replace(requests[which], request_id=name)
            client = Client(request, texts[which], float("inf"))
            if rng.random() < LEAVING:
                client.settled = bool(rng.random() < 0.5)
                client.patience = rng.exponential(15 if client.settled else 60)
                if client.settled and rng.random() < 0.5:
                    client.patience = 1.0  # within its prompt, however fast steps are
            clients[name] = client
            scheduler.add(client.request)
        leaving = [name for name, client in clients.items() if client.patience < 1]
        for name in leaving:
            clients[name].left_in = _phase(engine, name)
            scheduler.cancel(name)
        result = scheduler.step()
        for output in result.outputs:
            _take(tally, clients, output)
        assert not clients.keys() & set(leaving), "a slot was not freed within a step"
        assert scheduler._in_flight.keys() == clients.keys()
        for name, client in clients.items():
            client.patience -= not client.settled or _phase(engine, name) != "waiting"
    assert not scheduler.busy
    assert scheduler.target.cache.tokens == scheduler.target.cache.used_blocks == 0
    return tally


def _phase(engine: Engine, name: str) -> str:
    for state in engine.scheduler.running:
        if state.request.request_id == name:
            return "prefilling" if state.num_uncomputed_tokens else "decoding"
    return "waiting"


def _take(tally: Tally, clients: dict[str, Client], output: Output) -> None:
    client = clients[output.request_id]
    client.tokens += [piece.token for piece in output.pieces]
    got = tuple(client.tokens)
    assert got == client.expected[: len(got)], f"other tokens than alone: {client.request}"
    if output.finish is None:
        return
    del clients[output.request_id]
    tally.cached_tokens += output.stats.cached_prompt_tokens
    tally.preemptions += output.stats.preemptions
    if output.finish is FinishReason.CANCELLED:
        assert output.stats.generated_tokens == len(got)
        tally.left[client.left_in] += 1
        tally.wasted_tokens += len(got)
    else:
        assert got == client.expected
        tally.stayed += 1
