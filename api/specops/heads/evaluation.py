"""What a head brings on conversations that it was not trained on, beside looked-up draft tokens.

Speeds are of one request at a time. The ways take turns prompt by prompt, so that what else the
machine does falls on all of them alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specops.config import Settings
from specops.engine.engine import NO_DRAFTER, Engine
from specops.heads.shards import Conversation
from specops.request import GenerationRequest, GenerationStats

_PROMPTS = 24  # at most
_TOKENS = 128  # of an answer
_PAYS = 1.02  # times the speed without it: less is not told apart from chance
_LOOKUP, _HEAD, _BOTH = "suffix", "head", "cascade"


class OutputsDiffer(RuntimeError):  # noqa: N818 - named as what it says
    """A drafter has changed what a model says, which must never be."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Medians over the prompts of speeds over plain decoding, and tokens of all per pass.

    Attributes:
        prompts: that were measured.
        speedup: by drafter.
        tokens_per_jump: by drafter.
        acceptance: share of the head's draft tokens that were accepted, where it spoke alone.
    """

    prompts: int
    speedup: dict[str, float]
    tokens_per_jump: dict[str, float]
    acceptance: float

    @property
    def pays(self) -> bool:
        """Whether answers are faster with the head."""
        return self.speedup[_BOTH] > _PAYS * max(1.0, self.speedup[_LOOKUP])

    @property
    def verdict(self) -> str:
        """The outcome in a line."""
        return (
            f"the head {'pays' if self.pays else 'does not pay'} here: "
            f"{self.speedup[_BOTH]:.2f} times plain decoding with it, "
            f"{self.speedup[_LOOKUP]:.2f} with {_LOOKUP} alone (median of {self.prompts} "
            "held-out conversations, one at a time)"
        )


def evaluate(settings: Settings, conversations: Sequence[Conversation]) -> Evaluation:
    """Measure a head that `settings.draft` names.

    Args:
        conversations: that it was not trained on, at least one.

    Raises:
        OutputsDiffer: with some drafter a text became another one.
    """
    engine = Engine.load(replace(settings, slots=1))
    ways = (NO_DRAFTER, _LOOKUP, _HEAD, _BOTH)
    found: dict[str, list[GenerationStats]] = {name: [] for name in ways}
    chosen = conversations[:_PROMPTS]
    for turn, conversation in enumerate(chosen):
        texts = set()
        for way in (*ways[turn % len(ways) :], *ways[: turn % len(ways)]):
            tokens, stats = _answer(engine, settings, conversation, way)
            found[way].append(stats)
            texts.add(tokens)
        if len(texts) > 1:
            raise OutputsDiffer(f"conversation {conversation.number} differs between drafters")
    plain = [stats.tokens_per_second for stats in found[NO_DRAFTER]]
    return Evaluation(
        len(chosen),
        {
            name: statistics.median(
                stats.tokens_per_second / base if base else 1.0
                for stats, base in zip(found[name], plain, strict=True)
            )
            for name in ways[1:]
        },
        {
            name: sum(stats.generated_tokens - 1 for stats in found[name])
            / max(1, sum(stats.sequence_steps for stats in found[name]))
            for name in ways[1:]
        },
        sum(stats.accepted_tokens for stats in found[_HEAD])
        / max(1, sum(stats.draft_tokens for stats in found[_HEAD])),
    )


def _answer(
    engine: Engine, settings: Settings, conversation: Conversation, drafter: str
) -> tuple[tuple[int, ...], GenerationStats]:
    """The greedy answer with a drafter, and what it took."""
    request = GenerationRequest(
        request_id=f"{conversation.number}-{drafter}",
        prompt_tokens=tuple(conversation.prompt.tolist()),
        max_new_tokens=_TOKENS,
        drafter=drafter,
        k_draft=settings.max_k_draft,
        adaptive=True,
        client=drafter,
    )
    outputs = list(engine.generate(request))
    stats = outputs[-1].stats
    if stats is None:
        raise AssertionError("a finished request always has figures")
    return tuple(piece.token for output in outputs for piece in output.pieces), stats
