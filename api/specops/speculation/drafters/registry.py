"""The list of all drafters. Add a new one as a file in this folder and to `make_drafters`."""

from __future__ import annotations

from specops.runtime.cost_model import CostModel
from specops.runtime.kvcache.prefix_cache import PrefixSharing
from specops.runtime.model_runner import ModelRunner
from specops.runtime.suffixes import NgramTable
from specops.speculation.drafters.base import Drafter
from specops.speculation.drafters.draft_model import DraftModelDrafter
from specops.speculation.drafters.suffix import SuffixDrafter


def make_drafters(
    vocab_size: int,
    draft: tuple[ModelRunner, CostModel] | None = None,
    *,
    head: Drafter | None = None,
    reuse: PrefixSharing = PrefixSharing.CLIENT,
    ngrams: NgramTable | None = None,
) -> dict[str, tuple[Drafter, ...]]:
    """The drafters for each name in a request, in the order of asking.

    Args:
        vocab_size: the target's.
        draft: the draft model and the costs of its passes, if any.
        head: the draft head, if any.
        reuse, ngrams: see `SuffixDrafter`.
    """
    drafters: list[Drafter] = [SuffixDrafter(reuse, ngrams=ngrams)]  # the cheapest first
    if head is not None:
        drafters.append(head)
    if draft is not None:
        drafters.append(DraftModelDrafter(*draft, vocab_size=vocab_size))
    chains = {drafter.name: (drafter,) for drafter in reversed(drafters)}
    return chains | {"cascade": tuple(drafters)}
