"""The drafters that can be made of what there is, and their slots when requests come and go."""

from __future__ import annotations

from specops.request import DRAFTERS
from specops.speculation.drafters.registry import make_drafters
from tests.simulated_target import VOCAB, SimulatedTarget, Text
from tests.speculation.drafters.ask import propose
from tests.speculation.drafters.scripted import Scripted

HEAD = Scripted(Text(), 1.0, name="head")


def test_every_drafter_that_can_be_made_is_filed_under_its_own_name(
    runner: SimulatedTarget,
) -> None:
    assert list(make_drafters(VOCAB)) == ["suffix"]
    assert list(make_drafters(VOCAB, head=HEAD)) == ["head", "suffix", "cascade"]
    assert list(make_drafters(VOCAB, runner)) == ["draft", "suffix", "cascade"]  # type: ignore[arg-type]
    drafters = make_drafters(VOCAB, runner, head=HEAD)  # type: ignore[arg-type]
    assert all(drafter.name == name for name, drafter in drafters.items())
    assert tuple(drafters) == DRAFTERS  # the names that requests and settings take


def test_the_cascade_begins_and_releases_what_its_parts_keep(runner: SimulatedTarget) -> None:
    drafters = make_drafters(VOCAB, runner)  # type: ignore[arg-type]
    tokens = list(range(5, 25))
    found = []
    for _ in range(2):
        drafters["cascade"].begin(1, tokens, "ann")
        drafters["cascade"].prefill(1, tokens, 19)
        backlogs = [drafter.backlog(1, 20) for drafter in drafters.values()]
        assert backlogs == [1, 0, 1]
        found.append(propose(drafters["cascade"], tokens, 3, slot=1))
        drafters["cascade"].release(1)
    assert found[0] == found[1]
    assert runner.cache.used_blocks == 0
    assert [batch.num_tokens for batch in runner.passes] == [19, 1, 1, 1, 1, 1, 1]
