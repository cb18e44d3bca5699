"""The list of all drafters. A new one is a file beside this one, added to `make_drafters`."""

from __future__ import annotations

from specops.runtime.cost_model import CostModel
from specops.runtime.kvcache.prefix_cache import PrefixSharing
from specops.runtime.model_runner import ModelRunner
from specops.runtime.suffixes import NgramTable
from specops.speculation.drafters.base import Chain, LookupDrafter
from specops.speculation.drafters.draft_model import DraftModelDrafter
from specops.speculation.drafters.suffix import SuffixDrafter


def make_drafters(
    vocab_size: int,
    draft: ModelRunner | None = None,
    draft_costs: CostModel | None = None,
    *,
    head: LookupDrafter | None = None,
    reuse: PrefixSharing = PrefixSharing.CLIENT,
    ngrams: NgramTable | None = None,
) -> dict[str, Chain]:
    """The drafters behind each name in a request. `cascade` has all, the cheapest first.

    Args:
        vocab_size: the target's.
        draft: the draft model, if there is one.
        draft_costs: costs of its passes.
        head: the draft head, if there is one.
        reuse, ngrams: see `SuffixDrafter`.
    """
    suffix = SuffixDrafter(reuse, ngrams=ngrams)
    lookups: tuple[LookupDrafter, ...] = (suffix,) if head is None else (suffix, head)
    model = None
    if draft is not None:
        model = DraftModelDrafter(draft, vocab_size=vocab_size, costs=draft_costs)
    chains = {} if model is None else {model.name: Chain(model=model)}
    chains |= {drafter.name: Chain((drafter,)) for drafter in reversed(lookups)}
    return chains | {"cascade": Chain(lookups, model)}
