"""A request on its way: its tokens, its text and its counts."""

from __future__ import annotations

import numpy as np
import pytest

from specops.engine.sequence import Sequence
from specops.request import TARGET, DraftStats, FinishReason, GenerationRequest
from specops.runtime.sampling import Floats
from tests.simulated_target import VOCAB, Clock, grammars, make_request, tokenizer

A, B, C = 65, 66, 67  # tokens of the demo pair: "a", "b", "c"


def made(
    request: GenerationRequest, end_tokens: frozenset[int] = frozenset(), clock: Clock | None = None
) -> Sequence:
    return Sequence(
        request, tokenizer(), end_tokens=end_tokens, clock=clock or Clock(), grammars=grammars()
    )


def logits(*tokens: int) -> Floats:
    found = np.zeros((len(tokens), VOCAB + 8), np.float32)
    found[np.arange(len(tokens)), tokens] = 3.0
    return found


def test_what_is_missing_is_the_prompt_and_then_what_was_given_up() -> None:
    sequence = made(make_request(5, 10))
    assert sequence.missing == 5
    sequence.num_computed = 3
    assert sequence.missing == 2
    sequence.num_computed = 5
    sequence.append([A], 0, None, logits(A))
    assert sequence.missing == 0  # its newest token is computed when it decodes
    assert (sequence.generated, sequence.remaining) == (1, 9)
    sequence.append([A, B], 1, "suffix", logits(A, B))
    sequence.num_computed = 7
    assert sequence.missing == 0
    sequence.num_computed = 0  # preempted
    assert sequence.missing == 7


def test_tokens_come_out_with_their_text_and_their_origin() -> None:
    sequence = made(make_request(5, 10))
    assert sequence.output() is None
    assert sequence.append([A, B, C], 2, "suffix", logits(A, B, C)) == 3
    output = sequence.output()
    assert output.text == "abc"
    assert [piece.origin for piece in output.pieces] == ["suffix", "suffix", TARGET]
    assert (output.finish, output.stats) == (None, None)
    assert sequence.output() is None


def test_probabilities_are_those_of_the_logits_that_a_token_was_chosen_from() -> None:
    sequence = made(make_request(5, 10, logprobs=2))
    sequence.append([A, B], 1, "suffix", logits(A, C))
    output = sequence.output()
    first, second = (piece.logprob for piece in output.pieces)
    assert first.top[0] == (A, first.chosen)
    assert second.top[0][0] == C
    assert second.chosen < first.chosen


def test_counts_of_the_steps_become_the_statistics() -> None:
    clock = Clock(10.0)
    sequence = made(make_request(5, 6, arrival=7.0), clock=clock)
    sequence.start()
    clock.now = 12.0
    sequence.start()  # again, after a preemption: the queue was left once
    sequence.append([A], 0, None, logits(A))
    for drafted, accepted, missed in ((3, 2, False), (0, 0, True), (0, 0, False)):
        clock.now += 1.0
        tokens = [A] * (accepted + 1)
        sequence.append(tokens, accepted, "suffix", logits(*tokens))
        drafts = [DraftStats("suffix", drafted, accepted)] if drafted else []
        sequence.count_step(drafts, missed=missed)
    sequence.preemptions = 1
    output = sequence.output()
    assert output.finish is FinishReason.LENGTH
    stats = output.stats
    assert (stats.queue_seconds, stats.prefill_seconds, stats.decode_seconds) == (3.0, 2.0, 3.0)
    assert (stats.sequence_steps, stats.drafts, stats.draft_misses) == (3, 1, 1)
    assert (stats.draft_tokens, stats.accepted_tokens) == (3, 2)
    assert stats.accepted_per_position == (1, 1, 0)
    assert stats.tokens_per_jump == pytest.approx(5 / 3)
    assert stats.preemptions == 1


def test_only_a_last_output_is_urgent_where_nobody_streams() -> None:
    sequence = made(make_request(5, 2, stream=False))
    urgent = []
    for _ in range(2):
        sequence.append([A], 0, None, logits(A))
        output = sequence.output()
        urgent.append(output.urgent)
    assert urgent == [False, True]
