"""The list of all drafters. A new one is a file beside this one and a line in `make_drafters`."""

from __future__ import annotations

from specops.runtime.cost_model import CostModel
from specops.runtime.kv_cache import PrefixCache
from specops.runtime.model_runner import ModelRunner
from specops.speculation.drafters.base import Drafter
from specops.speculation.drafters.cascade import CascadeDrafter
from specops.speculation.drafters.draft_model import DraftModelDrafter
from specops.speculation.drafters.suffix import SuffixDrafter


def make_drafters(
    vocab_size: int,
    draft: ModelRunner | None = None,
    draft_costs: CostModel | None = None,
    *,
    head: Drafter | None = None,
    reuse: PrefixCache = PrefixCache.CLIENT,
) -> dict[str, Drafter]:
    """Every drafter that can be made, by name.

    Args:
        vocab_size: the target's.
        draft: the draft model, if there is one.
        draft_costs: costs of its passes.
        head: the draft head, if there is one.
        reuse: see `SuffixDrafter`.
    """
    drafters: list[Drafter] = []
    if draft is not None:
        drafters.append(DraftModelDrafter(draft, vocab_size=vocab_size, costs=draft_costs))
    if head is not None:
        drafters.append(head)
    drafters.append(SuffixDrafter(reuse))
    if len(drafters) > 1:
        drafters.append(CascadeDrafter(drafters[-1], drafters[0]))
    return {drafter.name: drafter for drafter in drafters}
