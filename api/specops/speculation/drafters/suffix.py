"""Draft tokens by looking up how a text went on where its last tokens stood before.

Code, quotations and structured text repeat themselves, and clients ask alike. All earlier places
are counted, in the request itself and in what the same client's earlier requests said, and every
token comes with the probability that it is right: a draft ends where it is not worth a place in a
pass. (Prompt lookup, https://github.com/apoorvumang/prompt-lookup-decoding, trusts the last match.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from specops.runtime.kv_cache import PrefixCache
from specops.runtime.suffixes import Estimate, History, Lookups
from specops.speculation.drafters.base import LEAST_REACH, NO_DRAFT, Draft, LookupDrafter

TEXT_TOKENS = 8192  # of a request that are remembered
HISTORY_TOKENS = 32_768  # of a client's requests
CLIENTS = 16  # whose requests are remembered; the one that came least recently is forgotten
MEMORY_BYTES = CLIENTS * HISTORY_TOKENS * 16  # three words a token and one in both tables of places


@dataclass(slots=True)
class _Slot:
    history: History | None
    lookups: Lookups


class SuffixDrafter(LookupDrafter):
    """Continues a sequence as its latest tokens mostly went on before.

    What is remembered over requests makes later ones faster, which can be measured: so it is kept
    apart as the prefix cache keeps what it remembers.

    Args:
        reuse: whose earlier requests a request may draw on.
        text_tokens: of a request that are remembered, at least 2; at least the latest half.
        history_tokens: of a client's requests, likewise.
        clients: that are remembered.
    """

    name = "suffix"

    def __init__(
        self,
        reuse: PrefixCache = PrefixCache.CLIENT,
        *,
        text_tokens: int = TEXT_TOKENS,
        history_tokens: int = HISTORY_TOKENS,
        clients: int = CLIENTS,
    ) -> None:
        self._reuse = reuse
        self._text_tokens = text_tokens
        self._history_tokens = history_tokens
        self._most_clients = clients
        self._estimate = Estimate()
        self._histories: OrderedDict[str, History] = OrderedDict()
        self._slots: dict[int, _Slot] = {}

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:
        """A client's sequence begins: it may draw on what this client's earlier ones said."""
        lookups = Lookups(self._text_tokens, self._estimate)
        self._slots[slot] = _Slot(self._history(client), lookups)

    def look_up(
        self, slot: int, tokens: Sequence[int], count: int, least: float = LEAST_REACH
    ) -> Draft:
        """Look the last tokens up; see `Drafter.look_up`."""
        state = self._slots[slot]
        found, promised = state.lookups.look_up(tokens, state.history, count, least)
        return Draft(found, promised=promised) if found else NO_DRAFT

    def release(self, slot: int) -> None:
        """Forget a slot; its client's history learns what it said, if it looked anything up."""
        state = self._slots.pop(slot, None)
        if state is not None and state.history is not None and state.lookups.length:
            state.history.learn(state.lookups)

    def _history(self, client: str) -> History | None:
        if self._reuse is PrefixCache.OFF:
            return None
        name = client if self._reuse is PrefixCache.CLIENT else ""
        history = self._histories.pop(name, None) or History(self._history_tokens)
        self._histories[name] = history
        if len(self._histories) > self._most_clients:
            self._histories.popitem(last=False)  # requests that hold it let go of it themselves
        return history
