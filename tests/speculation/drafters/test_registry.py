"""The drafters that can be made of what there is."""

from typing import Any

from specops.request import DRAFTERS
from specops.speculation.drafters.registry import make_drafters
from tests.simulated_target import VOCAB, SimulatedTarget, Text, tinyllama
from tests.speculation.drafters.scripted import Scripted

HEAD = Scripted(Text(), 1.0, name="head")


def test_every_drafter_that_can_be_made_is_filed_under_its_own_name(
    runner: SimulatedTarget,
) -> None:
    assert list(make_drafters(VOCAB)) == ["suffix", "cascade"]
    assert list(make_drafters(VOCAB, head=HEAD)) == ["head", "suffix", "cascade"]
    draft: Any = runner, tinyllama(0.1)
    assert list(make_drafters(VOCAB, draft)) == ["draft", "suffix", "cascade"]
    chains = make_drafters(VOCAB, draft, head=HEAD)
    assert tuple(chains) == DRAFTERS  # the names that requests and settings take
    names = {name: [one.name for one in chain] for name, chain in chains.items()}
    assert names.pop("cascade") == ["suffix", "head", "draft"]  # the cheapest first
    assert names == {name: [name] for name in names}
