"""Draft tokens by lookup: how did the last tokens continue before?

Code, quotations and structured text repeat themselves, and a client's requests are alike. The
latest matches in the request itself and in the same client's earlier requests vote, and so does a
table of the model's own n-grams. Each token comes with the probability that it is accepted; a draft
ends before the first token that is not worth verifying. (Prompt lookup,
https://github.com/apoorvumang/prompt-lookup-decoding, trusts the last match.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from specops.runtime.kvcache.prefix_cache import PrefixSharing
from specops.runtime.suffixes import Estimate, History, Lookups, NgramTable
from specops.speculation.drafters.base import NO_DRAFT, Draft, DraftContext, Drafter

TEXT_TOKENS = 8192  # remembered tokens of a request
HISTORY_TOKENS = 32_768  # remembered tokens of a client's earlier requests
CLIENTS = 16  # remembered clients; the least recent one is forgotten
MEMORY_BYTES = CLIENTS * HISTORY_TOKENS * 16  # per token 3 words and 1 in both position tables


class SuffixDrafter(Drafter):
    """Continues a sequence the way its last tokens usually continued before.

    Remembered requests make later ones faster, which a client can measure. So they are shared only
    as far as the prefix cache is.

    Args:
        reuse: which earlier requests a request may use.
        text_tokens: remembered tokens of a request, at least 2; the latest half is always kept.
        history_tokens: the same for a client's earlier requests.
        clients: number of remembered clients.
        ngrams: n-grams from texts that the model wrote itself.
    """

    name = "suffix"

    def __init__(
        self,
        reuse: PrefixSharing = PrefixSharing.CLIENT,
        *,
        text_tokens: int = TEXT_TOKENS,
        history_tokens: int = HISTORY_TOKENS,
        clients: int = CLIENTS,
        ngrams: NgramTable | None = None,
    ) -> None:
        self._reuse = reuse
        self._ngrams = ngrams
        self._text_tokens = text_tokens
        self._history_tokens = history_tokens
        self._max_clients = clients
        self._estimate = Estimate()
        self._histories: OrderedDict[str, History] = OrderedDict()
        self._slots: dict[int, tuple[Lookups, History | None]] = {}

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:
        """Start a slot, with the history that the client may use; see `Drafter.begin`."""
        table = None if self._ngrams is None else self._ngrams.address
        lookups = Lookups(self._text_tokens, self._estimate, table)
        self._slots[slot] = lookups, self._history(client)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Look up the last tokens of each text; see `Drafter.propose`."""
        drafts = []
        for context in contexts:
            lookups, history = self._slots[context.slot]
            found = lookups.look_up(context.text, history, context.max_draft, context.min_reach)
            drafts.append(found if found.tokens else NO_DRAFT)
        return drafts

    def release(self, slot: int) -> None:
        """Forget a slot; the new part of its text joins the client's history."""
        lookups, history = self._slots.pop(slot, (None, None))
        if lookups is not None and history is not None:
            history.learn(lookups)

    def _history(self, client: str) -> History | None:
        if self._reuse is PrefixSharing.OFF:
            return None
        name = client if self._reuse is PrefixSharing.CLIENT else ""
        history = self._histories.pop(name, None) or History(self._history_tokens)
        self._histories[name] = history
        if len(self._histories) > self._max_clients:
            self._histories.popitem(last=False)  # requests that use it keep it alive
        return history
