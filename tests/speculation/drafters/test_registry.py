"""The drafters that the means allow, and their slots when requests come and go."""

from __future__ import annotations

from collections.abc import Sequence

from specops.request import DRAFTERS
from specops.speculation.drafters.base import NO_DRAFT, Draft, LookupDrafter
from specops.speculation.drafters.registry import Means, make_drafters
from tests.simulated_target import VOCAB, SimulatedTarget
from tests.speculation.drafters.ask import propose


def means(runner: SimulatedTarget | None = None, **fields: object) -> Means:
    return Means(VOCAB, runner, **fields)  # type: ignore[arg-type]


class Head(LookupDrafter):
    """Has nothing."""

    name = "head"

    def look_up(self, slot: int, tokens: Sequence[int], count: int, least: float = 0.0) -> Draft:
        return NO_DRAFT


def test_what_there_is_depends_on_the_means(runner: SimulatedTarget) -> None:
    assert list(make_drafters(means())) == ["suffix"]
    assert list(make_drafters(means(head=Head()))) == ["head", "suffix", "cascade"]
    assert list(make_drafters(means(runner))) == ["draft", "suffix", "cascade"]


def test_every_drafter_is_filed_under_its_own_name(runner: SimulatedTarget) -> None:
    drafters = make_drafters(means(runner, head=Head()))
    assert all(drafter.name == name for name, drafter in drafters.items())
    assert tuple(drafters) == DRAFTERS  # the names that requests and settings take


def test_only_those_with_a_model_run_one(runner: SimulatedTarget) -> None:
    drafters = make_drafters(means(runner))
    assert {name for name, item in drafters.items() if item.runs_model} == {"draft", "cascade"}


def test_slots_of_all_drafters_are_begun_and_released_together(runner: SimulatedTarget) -> None:
    """The cascade shares its parts: they are told once, and what they keep is not forgotten."""
    drafters = make_drafters(means(runner))
    tokens = list(range(5, 25))
    found = []
    for _ in range(2):
        for drafter in drafters.values():
            drafter.begin(1, tokens, "ann")
        drafters["cascade"].take_in(1, tokens, 19)
        found.append(propose(drafters["cascade"], tokens, 3, slot=1))
        for drafter in drafters.values():
            drafter.release(1)
    assert found[0] == found[1]
    assert runner.cache.used_blocks == 0
    assert [batch.num_tokens for batch in runner.passes] == [19, 1, 1, 1, 1, 1, 1]


def test_what_is_looked_up_is_what_is_proposed_wherever_there_is_any(
    runner: SimulatedTarget,
) -> None:
    drafters = make_drafters(means(runner))
    for tokens in ([5, 6, 7, 5, 6], [5, 6, 7, 8]):
        drafters["suffix"].begin(0, tokens, "")
        for name in ("suffix", "cascade"):
            found = drafters[name].look_up(0, tokens, 2)
            assert bool(found.tokens) == (tokens[-1] == 6)
            if name != "cascade":
                assert propose(drafters[name], tokens, 2) == found
        for drafter in drafters.values():
            if drafter.name != "draft":
                drafter.release(0)
    assert not runner.passes


def test_the_backlog_is_what_the_next_draft_token_has_to_compute(runner: SimulatedTarget) -> None:
    drafters = make_drafters(means(runner))
    tokens = [5, 6, 7, 8, 9, 10]
    drafters["draft"].begin(0, tokens, "")
    drafters["draft"].take_in(0, tokens, 2)
    for name, expected in {"suffix": 0, "draft": 4, "cascade": 4}.items():
        assert drafters[name].backlog(0, len(tokens)) == expected
    propose(drafters["draft"], tokens, 1)
    assert runner.passes[-1].num_tokens == 4
