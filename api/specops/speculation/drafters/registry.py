"""Which drafters there are. A new one is a file beside this one and an entry in `MAKERS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specops.runtime.cost_model import CostModel
from specops.runtime.model_runner import ModelRunner
from specops.speculation.drafters.base import Drafter
from specops.speculation.drafters.cascade import CascadeDrafter
from specops.speculation.drafters.draft_model import DraftModelDrafter
from specops.speculation.drafters.ngram import MIN_MATCH, NgramDrafter
from specops.speculation.drafters.ngram_cache import NgramCacheDrafter


@dataclass(frozen=True, slots=True)
class Means:
    """What drafters can be made of.

    Attributes:
        vocab_size: the target's.
        draft: the draft model, if there is one.
        draft_costs: what its passes cost, see `DraftModelDrafter`.
        min_probability: see `DraftModelDrafter`.
        min_match: see `NgramDrafter`.
        shared_ngrams: entries of the table that requests share; 0: nothing is shared.
    """

    vocab_size: int
    draft: ModelRunner | None = None
    draft_costs: CostModel | None = None
    min_probability: float = 0.0
    min_match: int = MIN_MATCH
    shared_ngrams: int = 0


# Gets the means and the drafters made so far by name; None where the means are missing.
Maker = Callable[[Means, Mapping[str, Drafter]], Drafter | None]


def _draft_model(means: Means, made: Mapping[str, Drafter]) -> Drafter | None:
    if means.draft is None:
        return None
    return DraftModelDrafter(
        means.draft,
        vocab_size=means.vocab_size,
        costs=means.draft_costs,
        min_probability=means.min_probability,
    )


def _ngram(means: Means, made: Mapping[str, Drafter]) -> Drafter:
    return NgramDrafter(min_match=means.min_match)


def _ngram_cache(means: Means, made: Mapping[str, Drafter]) -> Drafter | None:
    if not means.shared_ngrams:
        return None
    return NgramCacheDrafter(NgramDrafter(min_match=means.min_match), entries=means.shared_ngrams)


def _cascade(means: Means, made: Mapping[str, Drafter]) -> Drafter | None:
    return CascadeDrafter(made["ngram"], made["draft"]) if "draft" in made else None


MAKERS: tuple[Maker, ...] = (_draft_model, _ngram, _ngram_cache, _cascade)


def make_drafters(means: Means, makers: Sequence[Maker] = MAKERS) -> dict[str, Drafter]:
    """Every drafter that the means allow, by name."""
    made: dict[str, Drafter] = {}
    for maker in makers:
        drafter = maker(means, made)
        if drafter is not None:
            made[drafter.name] = drafter
    return made
