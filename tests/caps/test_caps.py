"""A run below a memory limit finds kills, growth, long waits and plans that do not hold."""

import random
from argparse import Namespace
from collections import Counter
from itertools import islice
from typing import Any

import pytest

from tests.caps.__main__ import Seen, asks, judged

PLAN = {"anonymous": 500_000_000, "KV cache": 80_000_000}
LEVELS = [(100, 400_000_000), (2_100, 480_000_000), (4_000, 481_000_000)]


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        ({}, None),
        ({"kills": 1}, "the kernel killed 1 processes"),
        ({"peak": 430_000_000}, "the peak is 86.0% of the plan"),
        ({"peak": 545_000_000}, "the peak is 109.0% of the plan"),
        ({"peak": 430_000_000, "kv_tokens": 4_000, "unused_tokens": 3_000}, None),
        ({"plan": {}}, "there is no plan in the log"),
        ({"problems": ["schema: 500"]}, "schema: 500"),
        ({"first": {"at once": 7.0}}, "the first schema waited 7.0 s"),
        ({"levels": [*LEVELS, (5_000, 495_000_000)]}, "memory grew from 480.0 to 495.0 MB"),
    ],
)
def test_what_does_not_hold_is_told(seen: dict[str, Any], reason: str | None) -> None:
    fine = {"plan": PLAN, "peak": 490_000_000, "levels": LEVELS, "first": {"at once": 4.0}}
    told = judged(Seen(**{**fine, **seen}), Namespace(level=2_000))
    assert told == ([] if reason is None else [reason])


def test_requests_are_of_every_kind_that_the_model_has() -> None:
    def kinds(**has: bool) -> Counter[str]:
        return Counter(kind for kind, *_ in islice(asks(random.Random(0), 1024, **has), 100))

    some, every = kinds(chat=False, embeds=False), kinds(chat=True, embeds=True)
    assert every.keys() - some.keys() == {"tools", "chat", "embeddings"}
    assert min(every.values()) >= 9
