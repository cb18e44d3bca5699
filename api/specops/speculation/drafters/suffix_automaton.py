"""The longest suffix of a sequence that stood in it before, known after every appended token.

A suffix automaton (Blumer et al. 1985, https://doi.org/10.1016/0304-3975(85)90157-4; as a source
of drafts: Hu et al. 2024, https://arxiv.org/abs/2411.10666) has one state per set of substrings
that end at the same places, at most two per token, and grows in constant amortized time. The
suffix link of the state of the whole sequence *is* the longest suffix that occurred before, so
nothing is searched.
"""

from __future__ import annotations

_RECENT_STEPS = 8  # suffixes, from the longest down, whose latest place is brought up to date
_ROOT = 0


class SuffixAutomaton:
    """Grows by tokens.

    Attributes:
        length: tokens taken in.
        match_length: length of the longest suffix that ended at an earlier place, too.
        match_end: how many tokens there were at that place, so the index of the one that
            followed: the latest such place, but for suffixes that are more than 8 links deep,
            for which it may be an older one.
    """

    __slots__ = (
        "_last",
        "_lengths",
        "_links",
        "_next",
        "_places",
        "length",
        "match_end",
        "match_length",
    )

    def __init__(self) -> None:
        self.length = 0
        self.match_length = 0
        self.match_end = 0
        self._last = _ROOT
        self._next: list[dict[int, int]] = [{}]  # state: token to state
        self._links = [-1]  # state: the state of its longest suffix that ends elsewhere, too
        self._lengths = [0]  # state: length of its longest substring
        self._places = [0]  # state: where it ended last

    @property
    def states(self) -> int:
        """States in memory: at most two per token, and the root."""
        return len(self._next)

    def append(self, token: int) -> None:
        """Take in one token."""
        following, links, lengths = self._next, self._links, self._lengths
        self.length += 1
        state = self._last
        new = self._add({}, self.length, self.length)
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = links[state]
        if state < 0:
            link = _ROOT
        else:
            link = following[state][token]
            if lengths[link] != lengths[state] + 1:
                link = self._split(state, token, link)
        links[new] = link
        self._last = new
        self.match_length, self.match_end = lengths[link], self._places[link]
        self._place(link)

    def _add(self, following: dict[int, int], length: int, place: int) -> int:
        self._next.append(following)
        self._links.append(_ROOT)
        self._lengths.append(length)
        self._places.append(place)
        return len(self._next) - 1

    def _split(self, state: int, token: int, old: int) -> int:
        """Take those substrings of `old` that just occurred again out into a state of their own."""
        following, links = self._next, self._links
        copy = self._add(following[old].copy(), self._lengths[state] + 1, self._places[old])
        links[copy], links[old] = links[old], copy
        while state >= 0 and following[state].get(token) == old:
            following[state][token] = copy
            state = links[state]
        return copy

    def _place(self, state: int) -> None:
        """The longest suffixes end here now."""
        for _ in range(_RECENT_STEPS):
            if state == _ROOT:
                return
            self._places[state] = self.length
            state = self._links[state]
