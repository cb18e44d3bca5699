"""Draft tokens looked up in the request's own text and in what its client's earlier ones said."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specops.runtime.kvcache.prefix_cache import PrefixSharing
from specops.runtime.suffixes import Estimate, History, Lookups
from specops.speculation.drafters.base import NO_DRAFT, Draft, DraftContext
from specops.speculation.drafters.suffix import SuffixDrafter
from specops.system.memory import process_memory
from tests.speculation.drafters.ask import propose

ANN, BOB = "ann", "bob"
SAID = [1, 2, 3, 4, 5, 6]


def look_up(
    drafter: SuffixDrafter, tokens: Sequence[int], count: int, slot: int = 0, client: str = ANN
) -> Draft:
    """What a new request with these tokens is told."""
    drafter.begin(slot, tokens, client)
    found = propose(drafter, tokens, count, slot=slot)
    drafter.release(slot)
    return found


def alone() -> SuffixDrafter:
    """One that remembers nothing over requests."""
    return SuffixDrafter(PrefixSharing.OFF)


def test_continues_the_longest_match_however_old() -> None:
    known = [5, 4, 3, 2, 1, 6, 7]
    tokens = [*known, 9, 0, *known[1:], 8, 5, *known]
    assert look_up(alone(), tokens, 1).tokens == (9,)


def test_continues_a_period_beyond_the_end() -> None:
    assert look_up(alone(), [1, 2, 3, 1, 2, 3], 5).tokens == (1, 2, 3, 1, 2)
    assert look_up(alone(), [4, 4, 4], 4).tokens == (4, 4, 4, 4)


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3, 4, 5]])
def test_without_a_match_has_no_draft(tokens: list[int]) -> None:
    assert look_up(alone(), tokens, 4) is NO_DRAFT


def followers(tokens: Sequence[int]) -> set[int]:
    """The plain way: what followed the last two tokens where they occurred before, else the last.

    Which of them is proposed is for the votes: many short matches may outweigh a long one.
    """
    for length in (2, 1):
        suffix = tokens[-length:]
        ends = [e for e in range(length, len(tokens)) if tokens[e - length : e] == suffix]
        if ends:
            return {tokens[end] for end in ends}
    return set()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=16), st.integers(1, 16))
def test_grown_step_by_step_it_finds_what_a_scan_finds(tokens: list[int], first: int) -> None:
    """With so few places that all of them vote."""
    drafter = alone()
    drafter.begin(0, tokens, ANN)
    for length in range(min(first, len(tokens)), len(tokens) + 1):
        draft = propose(drafter, tokens[:length], 1)
        expected = followers(tokens[:length])
        assert draft.tokens[0] in expected if expected else draft is NO_DRAFT


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.integers(2, 20), st.integers(1, 9))
def test_a_full_text_is_that_of_its_latest_tokens(
    tokens: list[int], capacity: int, stride: int
) -> None:
    drafter = SuffixDrafter(PrefixSharing.OFF, text_tokens=capacity)
    drafter.begin(0, tokens, ANN)
    for length in range(1, len(tokens) + 1, stride):
        (token,) = propose(drafter, tokens[:length], 1).tokens or (None,)
        kept = range(max(0, length - capacity), length - min(length, capacity // 2) + 1)
        told = [look_up(alone(), tokens[begin:length], 1).tokens or (None,) for begin in kept]
        assert (token,) in told


@pytest.mark.parametrize("make", [History, lambda size: Lookups(size, Estimate())])
def test_refuses_a_capacity_that_means_nothing(make: type[History]) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        make(1)


def test_slots_are_apart_and_forgotten() -> None:
    drafter = alone()
    drafter.begin(0, [], ANN)
    drafter.begin(1, [], ANN)
    first = propose(drafter, [1, 2, 3, 1, 2], 1)
    second = propose(drafter, [9, 1, 2, 8, 1, 2], 1, slot=1)
    assert (first.tokens, second.tokens) == ((3,), (8,))
    drafter.release(0)
    drafter.release(0)  # nothing to forget is no error
    assert look_up(drafter, [7, 8], 1) is NO_DRAFT


def test_a_draft_says_where_it_was_found() -> None:
    drafter = SuffixDrafter()
    assert look_up(drafter, [1, 2, 3, 4, 1, 2], 2).found_in == "text"
    draft = look_up(drafter, [9, 2, 3], 1)
    assert (draft.tokens, draft.found_in) == ((4,), "history")
    assert draft.cut(1).found_in == "history"


# -- promises --------------------------------------------------------------------------------------


def followed(drafter: SuffixDrafter, tokens: Sequence[int], count: int = 4) -> list[Draft]:
    """What a request is told as its text grows token by token."""
    drafter.begin(0, [], ANN)
    found = [propose(drafter, tokens[:length], count) for length in range(1, len(tokens) + 1)]
    drafter.release(0)
    return found


def test_tokens_that_cannot_pay_are_left_out_and_learned_from_all_the_same() -> None:
    tokens = [1, 2, 3, 4, 5] * 40 + [1, 2, 7]
    low, high = alone(), alone()
    for drafter, least in ((low, 0.0), (high, 0.8)):
        drafter.begin(0, [], ANN)
        for length in range(1, len(tokens)):
            propose(drafter, tokens[:length], 8, min_reach=least)
    every, likely = propose(low, tokens, 8), propose(high, tokens, 8)
    assert every == likely
    reach = np.cumprod(propose(low, [*tokens, 3], 8).accept_probs)
    assert reach[-1] < reach[0]
    between = float(reach[0] + reach[-1]) / 2
    found = propose(high, [*tokens, 3], 8, min_reach=between)
    assert 0 < len(found.tokens) == int((reach >= between).sum()) < len(reach)


def test_promises_are_kept_in_every_tenth() -> None:
    """Texts that are copied in part, at rates of their own: what is promised is what comes true."""
    rng = np.random.default_rng(1)
    drafter = alone()
    tried, promised, kept = np.zeros((3, 10))
    for _ in range(60):
        rate, tokens = rng.uniform(0.3, 1.0), rng.integers(0, 60, 40).tolist()
        while len(tokens) < 340:
            tokens.append(tokens[-40] if rng.random() < rate else int(rng.integers(0, 60)))
        drafts = followed(drafter, tokens)
        for end, draft in enumerate(drafts, 1):
            told = zip(draft.tokens, draft.accept_probs, tokens[end:], strict=False)
            for token, probability, truth in told:
                tenth = min(int(10 * probability), 9)
                tried[tenth] += 1
                promised[tenth] += probability
                kept[tenth] += token == truth
                if token != truth:
                    break
    often = tried > 500
    assert often.sum() > 5
    assert (np.abs(promised - kept)[often] / tried[often] < 0.05).all()


# -- what is remembered over requests --------------------------------------------------------------


@pytest.mark.parametrize(
    ("reuse", "own", "others"),
    [
        (PrefixSharing.CLIENT, True, False),
        (PrefixSharing.ALL, True, True),
        (PrefixSharing.OFF, False, False),
    ],
)
def test_only_those_who_may_draw_on_what_was_said(
    reuse: PrefixSharing, *, own: bool, others: bool
) -> None:
    drafter = SuffixDrafter(reuse)
    look_up(drafter, SAID, 1)
    for client, known in ((ANN, own), (BOB, others)):
        assert look_up(drafter, [9, 3, 4], 2, client=client).tokens == ((5, 6) if known else ())
        drafter = SuffixDrafter(reuse)
        look_up(drafter, SAID, 1)


def test_the_client_that_came_least_recently_is_forgotten() -> None:
    drafter = SuffixDrafter(clients=2)
    look_up(drafter, SAID, 1, client=ANN)
    look_up(drafter, SAID, 1, client=BOB)
    look_up(drafter, SAID, 1, client="eve")
    assert look_up(drafter, [9, 3, 4], 1, client=BOB).tokens == (5,)
    assert look_up(drafter, [9, 3, 4], 1, client=ANN) is NO_DRAFT


def test_a_history_is_bounded() -> None:
    drafter = SuffixDrafter(history_tokens=16)
    for first in range(0, 1000, 4):
        look_up(drafter, range(first, first + 4), 1)
    assert look_up(drafter, [996, 997, 998], 1).tokens == (999,)
    assert look_up(drafter, [0, 1, 2], 1) is NO_DRAFT


def test_turns_of_a_chat_are_remembered_once() -> None:
    """Each prompt repeats all turns before it: copies would push out everything else."""
    rng = np.random.default_rng(0)
    drafter, chat = SuffixDrafter(history_tokens=4096), rng.integers(100, 9999, 600).tolist()
    look_up(drafter, SAID, 1)
    for _ in range(8):
        look_up(drafter, chat, 1)
        chat += rng.integers(100, 9999, 100).tolist()
    assert look_up(drafter, [9, 3, 4], 2).tokens == (5, 6)
    for end in (40, 599, 700, 1250):  # and all turns are there, across their borders, too
        assert look_up(drafter, chat[end - 3 : end], 1).tokens == (chat[end],)


def test_a_preempted_request_is_remembered_once() -> None:
    drafter, text = SuffixDrafter(history_tokens=200), list(range(100, 160))
    look_up(drafter, SAID, 1)
    for length in range(40, 60):
        look_up(drafter, text[:length], 1)
    assert look_up(drafter, [9, 3, 4], 1).tokens == (5,)
    assert look_up(drafter, text[55:58], 1).tokens == (158,)


PIECES = [list(range(100 * size, 100 * size + size)) for size in (3, 10, 34, 40)]


@given(st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=4), min_size=1, max_size=4))
def test_what_texts_have_in_common_is_found_in_each(pieces: list[list[list[int]]]) -> None:
    drafter, followers = SuffixDrafter(), defaultdict(set)
    for text in ([*chain(*parts)] for parts in pieces):
        look_up(drafter, text, 1)
        for end in range(3, len(text) + 1):
            followers[tuple(text[end - 3 : end])].add((*text[end : end + 1],))
    for tokens, following in followers.items():
        assert look_up(drafter, tokens, 1).tokens in following


def test_a_history_takes_sixteen_bytes_a_token() -> None:
    """Tables of places, which are written at once, take four of them; `MEMORY_BYTES` counts so."""
    tokens = 1 << 25  # so that pages of 2 MB and the process's other threads count little
    before = process_memory().anon
    history = History(tokens)
    assert process_memory().anon - before < 5 * tokens
    assert history.handle


def test_what_is_chosen_among_several_places_is_right_as_often_as_promised() -> None:
    """A place that promises most often promises too much. Texts of a chain of 60 tokens."""
    rng, drafter = np.random.default_rng(0), SuffixDrafter()
    following = rng.dirichlet(np.full(60, 0.05), size=60)
    made = np.zeros((10, 3))  # by tenth of the promise: number, promised, right
    for request in range(60):
        text = [0]
        drafter.begin(0, text, "ann")
        for _ in range(200):
            (draft,) = drafter.propose([DraftContext(0, text, 1, rng)])
            text.append(int(rng.choice(60, p=following[text[-1]])))
            if draft.tokens and request >= 20:  # it has learned
                (promised,) = draft.accept_probs
                made[int(10 * promised)] += 1, promised, draft.tokens[0] == text[-1]
        drafter.release(0)
    often = made[made[:, 0] > 500]
    assert len(often) > 3
    assert np.abs((often[:, 1] - often[:, 2]) / often[:, 0]).max() < 0.04
