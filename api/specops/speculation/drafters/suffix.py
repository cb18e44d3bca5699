"""Draft tokens by looking up how the last tokens were continued before.

Code, quotations and structured text repeat themselves, and a client's requests are alike. The
latest matches in the request itself vote, as do those in the same client's earlier requests; a
table of the model's own n-grams is the third place. Each token comes with the probability that it
is accepted: a draft ends where the next token would not be worth its place in a pass. (Prompt
lookup, https://github.com/apoorvumang/prompt-lookup-decoding, trusts the last match.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from specops.runtime.kvcache.prefix_cache import PrefixSharing
from specops.runtime.suffixes import Estimate, History, Lookups, NgramTable
from specops.speculation.drafters.base import NO_DRAFT, Draft, DraftContext, Drafter

TEXT_TOKENS = 8192  # remembered tokens of a request
HISTORY_TOKENS = 32_768  # remembered tokens of a client's earlier requests
CLIENTS = 16  # remembered clients; the one whose last request is oldest is forgotten
MEMORY_BYTES = CLIENTS * HISTORY_TOKENS * 16  # three words a token and one in both tables of places


class SuffixDrafter(Drafter):
    """Continues a sequence as its last tokens were mostly continued before.

    What is remembered of one request makes later ones faster, which a client can measure. So it is
    shared only as far as the prefix cache is.

    Args:
        reuse: which earlier requests a request may use.
        text_tokens: number of remembered tokens of a request, at least 2; at least the latest half
            of them are kept.
        history_tokens: the same for a client's earlier requests.
        clients: number of remembered clients.
        ngrams: a table of n-grams of texts that the model wrote itself.
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
        """Begin a slot, with the history that the client's request may use."""
        table = None if self._ngrams is None else self._ngrams.address
        lookups = Lookups(self._text_tokens, self._estimate, table)
        self._slots[slot] = lookups, self._history(client)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Look each text's last tokens up; see `Drafter.propose`."""
        drafts = []
        for context in contexts:
            lookups, history = self._slots[context.slot]
            found = lookups.look_up(context.text, history, context.max_draft, context.min_reach)
            drafts.append(found if found.tokens else NO_DRAFT)
        return drafts

    def release(self, slot: int) -> None:
        """Forget a slot; the new part of its text goes into the client's history."""
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
