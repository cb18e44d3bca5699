"""Models whose last layers read the keys and values of others: the same text in all kinds of steps.

A small Gemma 4 with random weights: windows of 40, heads of two sizes, rows of each layer.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specops.request import SamplingParams
from tests.checkpoints import make_gemma4_checkpoint
from tests.engine.test_states import (
    SAMPLINGS,
    Known,
    Target,
    alone,
    assert_said,
    exported,
    prompt,
)
from tests.passes import Passes
from tests.simulated_target import make_request, make_scheduler, serve

WINDOW = 40


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared") / "source"
    return exported(
        make_gemma4_checkpoint(path, config={"max_position_embeddings": 2048}), "int8-32"
    )


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_drafts_with_wrong_tokens_change_nothing(graph: Path, sampling: SamplingParams) -> None:
    known = Known()
    scheduler = make_scheduler(Target(graph), [known])
    fields = {"drafter": "known", "k_draft": 6, "adaptive": False, "sampling": sampling}
    lengths = (1, WINDOW - 2, 200)
    requests = [make_request(prompt(length), 40, **fields) for length in lengths]
    known.texts += [(*item.prompt_tokens, *alone(graph, item)) for item in requests]
    served = serve(scheduler, *requests)
    assert_said(graph, served, *requests)
    accepted = [draft.accepted for step in served.results for draft in step.drafts]
    drafted = [len(draft.tokens) for step in served.results for draft in step.drafts]
    assert 0 < sum(accepted) < sum(drafted)


def test_preempted_requests_go_on_with_the_same_text(graph: Path) -> None:
    scheduler = make_scheduler(Target(graph, num_blocks=6))
    requests = [make_request(prompt(50, seed), 120, sampling=SAMPLINGS[1]) for seed in range(3)]
    served = serve(scheduler, *requests)
    assert sum(served.stats(request).preemptions for request in requests)
    assert_said(graph, served, *requests)


def test_a_beginning_in_common_is_read_once(graph: Path) -> None:
    scheduler, common = make_scheduler(Target(graph, slots=1)), prompt(150)
    for count in range(3):
        request = make_request((*common, *prompt(30, count)), 8)
        served = serve(scheduler, request)
        assert served.stats(request).cached_prompt_tokens >= (128 if count else 0)
        assert_said(graph, served, request)


def test_only_rows_with_logits_go_through_the_last_layers(graph: Path) -> None:
    """Their bits are those of a pass that computes all rows."""
    passes, tokens = Passes(graph), prompt(130)
    whole = passes.step(0, tokens)
    few = passes.together({1: tokens[:100], 2: tokens}, num_logits=3)
    np.testing.assert_array_equal(few[1], whole[97:100])
    np.testing.assert_array_equal(few[2], whole[-3:])
    passes.rewind(1, 90)
    none = passes.together({1: tokens[90:120]}, num_logits=0)
    assert not len(none[1])
    np.testing.assert_array_equal(passes.step(1, tokens[120:]), whole[120:])
