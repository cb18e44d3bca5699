"""Who goes first: for the next slot, for the room of a pass, and for KV blocks when none is left.

One rule for all three: the earliest deadline goes first, and a request's deadline is its arrival
plus a multiple of the seconds that computing the rest of its prompt takes. So a question overtakes
a document, and the document overtakes whatever comes later than its deadline: nobody starves. That
is highest response ratio next (Brinch Hansen 1971) with a fixed ratio in place of the highest: a
deadline does not change while a request waits.

A priority moves the arrival by a number of seconds: a suggestion for an editor is worth little
after a second, and a prompt that is only computed ahead can wait.

Above the rule stand shares. While several clients' prompts wait, one that got more than the others
goes behind them: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996; for language models:
Sheng et al., Fairness in Serving Large Language Models, OSDI 2024) with a lead within which the
rule decides alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from specops.engine.request_state import RequestState
from specops.runtime.cost_model import PrefillSpeed
from specops.runtime.kvcache.manager import KvCache

PATIENCE = 8.0
"""A deadline is the arrival plus this multiple of the seconds that the prompt takes alone."""
LEAD = 4096
"""Tokens by which a client may be ahead of another one that waits."""
_GENERATED = 2.0  # prompt tokens that a generated token counts as: at best slots share its pass


class Order:
    """Ranks requests and keeps the clients' accounts. Used by the engine's thread.

    A client's account is the number of tokens that it got: unknown tokens of its prompts, and
    generated ones. A client whose prompts begin to wait starts at the lowest account of those that
    wait already: idling earns no credit. Without keys all requests belong to one client.

    Args:
        cache: the target's: it knows the beginnings of prompts.
        speed: how long prompts take, as measured at the start.
    """

    def __init__(self, cache: KvCache, speed: PrefillSpeed) -> None:
        self._cache, self._speed = cache, speed
        self._accounts: defaultdict[str, float] = defaultdict(float)
        self._prompts: list[RequestState] = []  # in slots, not yet computed
        self._ahead: set[str] = set()  # clients of theirs that go after the others

    def seconds(self, state: RequestState) -> float:
        """Seconds that the tokens take which are to be computed before it decodes, alone."""
        left, held = state.num_uncomputed_tokens, state.num_computed
        if state.slot < 0 and state.reader is None:
            held = self._cache.cached(state.tokens, state.request.client)
            left -= held
        return self._speed.seconds(left, held) + self._speed.token_seconds * state.more_tokens

    def rank(self, state: RequestState) -> float:
        """A request's deadline by the engine's clock: the lowest goes first."""
        return state.request.turn + PATIENCE * self.seconds(state)

    def sort(self, prompts: list[RequestState]) -> None:
        """Sort the prompts in slots: the room of a pass goes to the first, then to the next."""
        self._prompts = prompts
        self._ahead = self.ahead(self._given()) if len(prompts) > 1 else set()
        prompts.sort(key=self.place)

    def place(self, state: RequestState) -> tuple[bool, float]:
        """Among prompts in slots the lowest goes first; a waiting request joins them there."""
        return state.request.client in self._ahead, self.rank(state)

    def ahead(self, given: Mapping[str, float]) -> set[str]:
        """The clients that have to let the others go first, by how much each has got."""
        least = min(given.values(), default=0.0) + LEAD
        return {client for client, tokens in given.items() if tokens > least}

    def account(self, client: str) -> float:
        """Tokens that a client got or will get for its requests in slots."""
        return self._accounts[client]

    def arrive(self, client: str, waiting: Iterable[str]) -> None:
        """Open a client's account for a request that comes; others wait for slots."""
        given = {name: self._accounts[name] for name in waiting} | self._given()
        if not given:  # nobody waits, so nobody took anything from another
            self._accounts.clear()
        elif client not in given:
            self._accounts[client] = max(self._accounts[client], min(given.values()))

    def admitted(self, state: RequestState) -> None:
        """Charge a client for a prompt that got its slot, less the tokens that are known."""
        self._accounts[state.request.client] += _unread(state)

    def generated(self, client: str, tokens: int) -> None:
        """Charge a client for new tokens of an answer."""
        self._accounts[client] += _GENERATED * tokens

    def _given(self) -> dict[str, float]:
        """The work that clients with prompts in slots got, less the work still to do."""
        given: dict[str, float] = {}
        for state in self._prompts:
            if state.slot >= 0 and not state.finish and (unread := _unread(state)):
                client = state.request.client
                given[client] = given.get(client, self._accounts[client]) - unread
        return given


def _unread(state: RequestState) -> int:
    return state.num_uncomputed_tokens + state.more_tokens
