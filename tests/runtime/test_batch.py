"""A batch is spans one after the other, and counts what they cost."""

import pytest

from specops.runtime.batch import Batch, Span


def test_spans_are_concatenated_and_their_last_tokens_get_logits() -> None:
    batch = Batch()
    batch.add(3, 10, (7,), num_logits=1)
    batch.add(0, 20, [1, 2, 3, 4], num_logits=3)
    batch.add(1, 0, [5, 6])
    assert batch.spans == [
        Span(3, 10, (7,), 1),
        Span(0, 20, [1, 2, 3, 4], 3),
        Span(1, 0, [5, 6], 0),
    ]
    assert batch.tokens == [7, 1, 2, 3, 4, 5, 6]
    assert batch.logit_rows == [0, 2, 3, 4]
    assert (batch.num_tokens, batch.num_logits) == (7, 4)


def test_attention_work_is_the_pairs_of_tokens() -> None:
    batch = Batch()
    assert batch.attention_work == 0
    batch.add(0, 100, [1])
    assert batch.attention_work == 100.5
    batch.add(1, 0, [1] * 10)
    assert batch.attention_work == 150.5
    batch.add(2, 1000, [1] * 4)
    assert batch.attention_work == 150.5 + 4 * 1002


@pytest.mark.parametrize(("tokens", "num_logits"), [([], 0), ([1], 2), ([1], -1)])
def test_a_span_without_tokens_or_with_too_many_logits_is_refused(
    tokens: list[int], num_logits: int
) -> None:
    batch = Batch()
    with pytest.raises(ValueError, match="a span of"):
        batch.add(0, 0, tokens, num_logits)
    assert not batch.spans


def test_a_slot_has_one_span_in_a_pass() -> None:
    """Two would write and read the same positions in any order."""
    batch = Batch()
    batch.add(0, 0, [1])
    with pytest.raises(ValueError, match="slot 0 has a span"):
        batch.add(0, 1, [1])
    assert batch.num_tokens == 1
