"""Measures the speed with a head, on held-out conversations, against plain decoding and lookups.

One request runs at a time. The drafters alternate prompt by prompt, so that other load on the
machine affects all of them alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specops.config import Settings
from specops.engine.engine import NO_DRAFTER, Engine
from specops.heads.storage import Conversation
from specops.request import GenerationRequest, GenerationStats, SamplingParams

_PROMPTS = 24  # most prompts that are measured
_LEAST_PROMPTS = 4  # that are measured however long it takes: so each drafter comes first once
_TOKENS = 128  # most tokens of an answer
_TEMPERATURES = (0.0, 0.7)
_PAYS = 1.02  # a smaller speedup may be chance
_LOOKUP, _HEAD, _BOTH = "suffix", "head", "cascade"
_WAYS = (NO_DRAFTER, _LOOKUP, _HEAD, _BOTH)

_Figures = dict[float, dict[str, list[GenerationStats]]]


class OutputsDiffer(RuntimeError):  # noqa: N818 - named as what it says
    """A drafter has changed the output of a model, which must never happen."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of a measurement.

    Attributes:
        temperature: at which the answers were sampled.
        prompts: number of prompts.
        threads: number of threads that computed.
        speedup: median speedup over plain decoding, by drafter.
        tokens_per_jump: tokens per forward pass, by drafter.
    """

    temperature: float
    prompts: int
    threads: int
    speedup: dict[str, float]
    tokens_per_jump: dict[str, float]

    @property
    def pays(self) -> bool:
        """Whether the head makes answers faster.

        It does so by saving passes only: where it saves none, the clock was disturbed.
        """
        saved = self.tokens_per_jump[_BOTH] > _PAYS * self.tokens_per_jump[_LOOKUP]
        return saved and self.speedup[_BOTH] > _PAYS * max(1.0, self.speedup[_LOOKUP])

    @property
    def verdict(self) -> str:
        """The result in a few words."""
        drawn = f"at temperature {self.temperature}" if self.temperature else "greedily"
        judged = f"the head {'pays' if self.pays else 'does not pay'}"
        if self.prompts < _LEAST_PROMPTS:
            judged = "too few conversations were held out to tell whether the head pays"
        jumps = self.tokens_per_jump
        return (
            f"{drawn} {judged}: "
            f"{self.speedup[_BOTH]:.2f} times plain decoding's speed with it, "
            f"{self.speedup[_LOOKUP]:.2f} with {_LOOKUP} alone "
            f"({jumps[_BOTH]:.2f} and {jumps[_LOOKUP]:.2f} tokens per pass)"
        )


def evaluate(
    settings: Settings,
    conversations: Sequence[Conversation],
    seconds: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> list[Evaluation]:
    """Measure the head of `settings.draft`, greedily and at temperature 0.7, with seeds.

    Args:
        settings: the settings.
        conversations: conversations that it was not trained on, at least one.
        seconds: after which no further conversation is begun.
        clock: returns seconds.

    Raises:
        OutputsDiffer: the output with some drafter differs.
    """
    # What one drafter's answers leave behind must not help another one's.
    settings = replace(settings, slots=1, prefix_cache="client")
    engine, end = Engine.load(settings), clock() + seconds
    figures: _Figures = {at: {way: [] for way in _WAYS} for at in _TEMPERATURES}
    for measured, conversation in enumerate(conversations[:_PROMPTS]):
        if clock() > end and measured >= _LEAST_PROMPTS:
            break
        turn = measured % len(_WAYS)
        for temperature, by_way in figures.items():
            texts = set()
            for way in (*_WAYS[turn:], *_WAYS[:turn]):
                tokens, stats = _answer(engine, settings, conversation, way, temperature)
                by_way[way].append(stats)
                texts.add(tokens)
            if len(texts) > 1:
                raise OutputsDiffer(f"conversation {conversation.number} differs between drafters")
    return [
        _summary(temperature, engine.info.threads, by_way)
        for temperature, by_way in figures.items()
    ]


def _summary(
    temperature: float, threads: int, figures: dict[str, list[GenerationStats]]
) -> Evaluation:
    plain = [stats.tokens_per_second for stats in figures[NO_DRAFTER]]
    return Evaluation(
        temperature,
        len(plain),
        threads,
        {
            name: statistics.median(
                stats.tokens_per_second / base if base else 1.0
                for stats, base in zip(figures[name], plain, strict=True)
            )
            for name in _WAYS[1:]
        },
        {
            name: sum(stats.generated_tokens - 1 for stats in figures[name])
            / max(1, sum(stats.sequence_steps for stats in figures[name]))
            for name in _WAYS[1:]
        },
    )


def _answer(
    engine: Engine,
    settings: Settings,
    conversation: Conversation,
    drafter: str,
    temperature: float,
) -> tuple[tuple[int, ...], GenerationStats]:
    """Return the answer with a drafter, and its figures."""
    request = GenerationRequest(
        request_id=f"{conversation.number}-{drafter}",
        prompt_tokens=tuple(conversation.prompt.tolist()),
        max_new_tokens=_TOKENS,
        sampling=SamplingParams(temperature, seed=conversation.number),
        drafter=drafter,
        k_draft=settings.max_k_draft,
        adaptive=True,
        client=f"{drafter} at {temperature}",
    )
    outputs = list(engine.generate(request))
    stats = outputs[-1].stats
    if stats is None:
        raise AssertionError("a finished request always has figures")
    return tuple(piece.token for output in outputs for piece in output.pieces), stats
