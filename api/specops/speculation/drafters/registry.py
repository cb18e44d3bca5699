"""Which drafters there are. A new one is a file beside this one and an entry in `MAKERS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specops.runtime.cost_model import CostModel
from specops.runtime.kv_cache import PrefixCache
from specops.runtime.model_runner import ModelRunner
from specops.speculation.drafters.base import Drafter
from specops.speculation.drafters.cascade import CascadeDrafter
from specops.speculation.drafters.draft_model import DraftModelDrafter
from specops.speculation.drafters.suffix import SuffixDrafter


@dataclass(frozen=True, slots=True)
class Means:
    """What drafters can be made of.

    Attributes:
        vocab_size: the target's.
        draft: the draft model, if there is one.
        head: a draft head, if there is one.
        draft_costs: what its passes cost, see `DraftModelDrafter`.
        min_probability: see `DraftModelDrafter`.
        reuse: see `SuffixDrafter`.
    """

    vocab_size: int
    draft: ModelRunner | None = None
    draft_costs: CostModel | None = None
    head: Drafter | None = None
    min_probability: float = 0.0
    reuse: PrefixCache = PrefixCache.CLIENT


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


def _head(means: Means, made: Mapping[str, Drafter]) -> Drafter | None:
    return means.head


def _suffix(means: Means, made: Mapping[str, Drafter]) -> Drafter:
    return SuffixDrafter(means.reuse)


def _cascade(means: Means, made: Mapping[str, Drafter]) -> Drafter | None:
    model = made.get("draft") or made.get("head")
    return CascadeDrafter(made["suffix"], model) if model else None


MAKERS: tuple[Maker, ...] = (_draft_model, _head, _suffix, _cascade)


def make_drafters(means: Means, makers: Sequence[Maker] = MAKERS) -> dict[str, Drafter]:
    """Every drafter that the means allow, by name."""
    made: dict[str, Drafter] = {}
    for maker in makers:
        drafter = maker(means, made)
        if drafter is not None:
            made[drafter.name] = drafter
    return made
