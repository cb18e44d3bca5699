"""Models with recurrent layers or shared keys: the same text in all passes, little read twice.

A small LFM2, whose convolutions read the two tokens before each, a small Qwen3.5, whose gated delta
rule has a state, and a small Granite 4, whose Mamba-2 has one; a small Gemma 4, whose last layers
read the keys and values of others, with windows of 40. Their weights are random.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from specops.models.convert import Quantization, export_checkpoint
from specops.request import FinishReason, GenerationRequest, SamplingParams
from specops.runtime.kvcache.manager import KvCache
from specops.runtime.kvcache.recurrent_state import INTERVAL
from specops.runtime.model_runner import ModelRunner, cache_shape
from specops.runtime.session import open_session
from specops.speculation.drafters.base import DraftContext, LookupDrafter
from specops.speculation.drafters.draft_model import DraftModelDrafter
from tests.checkpoints import make_checkpoint
from tests.passes import Passes, prepared
from tests.simulated_target import (
    Clock,
    Served,
    make_request,
    make_scheduler,
    serve,
    tinyllama,
)
from tests.speculation.drafters.ask import propose

VOCAB = 320
SAMPLINGS = [SamplingParams(), SamplingParams(0.8, seed=3)]


class Target(ModelRunner):
    """A runner that knows how many tokens it has computed.

    There is room for four snapshots for each slot.
    """

    def __init__(self, graph: Path, *, slots: int = 3, num_blocks: int = 80) -> None:
        session = open_session(graph)
        shape = cache_shape(session, "fp32")
        sizes = {"num_blocks": num_blocks, "num_slots": slots, "context": 2048}
        cache = KvCache(shape, **sizes, snapshot_bytes=4 * slots * shape.slot_bytes)
        super().__init__(session, cache, max_tokens=300)
        self.clock = Clock()
        self.computed = 0

    def forward(self, batch):
        self.computed += batch.num_tokens
        return super().forward(batch)


class Known(LookupDrafter):
    """Knows answers by their prompts; each of its tokens is wrong with a probability of 0.3."""

    name = "known"

    def __init__(self) -> None:
        self.texts: list[tuple[int, ...]] = []
        self._rng = np.random.default_rng(3)

    def look_up(self, context: DraftContext) -> Sequence[int]:
        said = tuple(context.text)
        text = next((text for text in self.texts if text[: len(said)] == said), said)
        found = np.array(text[len(said) : len(said) + context.max_draft], np.int64)
        wrong = self._rng.random(len(found)) < 0.3
        return ((found + wrong) % VOCAB).tolist()


RECURRENT = ["lfm2", "qwen3.5", "granite"]
every_model = pytest.mark.parametrize(
    "source", [*RECURRENT, "gemma4"], indirect=True, scope="module"
)


@pytest.fixture(scope="module", params=RECURRENT)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("states") / "source"
    config = {"max_position_embeddings": 2048}
    if request.param == "qwen3.5":
        return make_checkpoint(path, "qwen3_5_text", layers=3, config=config)
    if request.param == "gemma4":
        return make_checkpoint(path, "gemma4_text", config=config)
    if request.param == "granite":
        return make_checkpoint(path, "granitemoehybrid", config=config)
    return make_checkpoint(path, "lfm2", layers=4, config=config)


def exported(source: Path, quantization: str) -> Path:
    folder = source.parent
    quant = Quantization.parse(quantization)
    model = export_checkpoint(source, folder / quantization, quantization=quant)
    return prepared(model.graph_file, folder / "cache")


@pytest.fixture(scope="module")
def graph(source: Path) -> Path:
    return exported(source, "int8-32")


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng((length, seed)).integers(1, VOCAB, length).tolist())


def alone(graph: Path, request: GenerationRequest) -> list[int]:
    """The request's tokens by plain decoding in a service of its own."""
    target = Target(graph, slots=1)
    again = make_request(request.prompt_tokens, request.max_new_tokens, sampling=request.sampling)
    return serve(make_scheduler(target), again).tokens(again)


def assert_said(graph: Path, served: Served, *requests: GenerationRequest) -> None:
    for request in requests:
        assert served.tokens(request) == alone(graph, request)


@every_model
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_drafts_with_wrong_tokens_change_nothing(graph: Path, sampling: SamplingParams) -> None:
    known = Known()
    target = Target(graph)
    scheduler = make_scheduler(target, [known])
    fields = {"drafter": "known", "k_draft": 6, "adaptive": False, "sampling": sampling}
    requests = [make_request(prompt(length), 40, **fields) for length in (1, 38, 200)]
    known.texts += [(*item.prompt_tokens, *alone(graph, item)) for item in requests]
    served = serve(scheduler, *requests)
    assert_said(graph, served, *requests)
    accepted = [draft.accepted for step in served.results for draft in step.drafts]
    drafted = [len(draft.tokens) for step in served.results for draft in step.drafts]
    assert 0 < sum(accepted) < sum(drafted)  # both accepted and rejected ones


def test_a_draft_model_with_convolutions_goes_back_behind_rejected_tokens(
    graph: Path, source: Path
) -> None:
    """It has the target's weights in 4 bits, so that it is often right."""
    small, costs = Target(exported(source, "int4-32-rtn")), tinyllama(0.1)
    model = DraftModelDrafter(small, costs, vocab_size=VOCAB)
    scheduler = make_scheduler(Target(graph), [model], draft_costs=tinyllama(0.1))
    fields = {"drafter": "draft", "k_draft": 8, "adaptive": False}
    samplings = (*SAMPLINGS, SamplingParams(1.5, seed=4))
    requests = [make_request(prompt(70), 30, sampling=item, **fields) for item in samplings]
    served = serve(scheduler, *requests)
    assert_said(graph, served, requests[0])
    drafts = [draft for step in served.results for draft in step.drafts]
    assert any(draft.accepted == len(draft.tokens) for draft in drafts)
    assert any(draft.accepted < len(draft.tokens) for draft in drafts)
    assert [served.finish(request) for request in requests] == [FinishReason.LENGTH] * 3


@pytest.mark.parametrize("reads_ahead", [True, False])
def test_a_draft_model_reads_a_beginning_in_common_twice_and_then_no_more(
    graph: Path, reads_ahead: bool
) -> None:
    drafter = DraftModelDrafter(Target(graph, slots=1), tinyllama(0.1), vocab_size=VOCAB)
    common, held = prompt(130), []
    for count in range(4):
        text = (*common, *prompt(400, count))
        drafter.begin(0, text, "")
        assert not drafter.is_synced(0, text)  # which begins with what there is
        held.append(drafter.runner.cache.length(0))
        while reads_ahead and drafter.read(0, text, 400):
            pass
        propose(drafter, text, 2)
        drafter.release(0)
    assert held == [0, 0, 130, 130]


def test_a_conversation_reads_only_what_is_new(graph: Path) -> None:
    target = Target(graph, slots=1)
    scheduler = make_scheduler(target)
    text, held = prompt(60), 0
    for turn in range(4):
        request = make_request(text, 20)
        served = serve(scheduler, request)
        assert_said(graph, served, request)
        assert served.stats(request).cached_prompt_tokens == held
        held = len(text) + 19  # the last token was never computed
        text += (*served.tokens(request), *prompt(9, turn))


def test_an_answer_that_is_left_out_of_the_history_costs_only_itself(graph: Path) -> None:
    """As a template that drops thinking does; the next turn differs from the prompt's end on."""
    target = Target(graph, slots=1)
    scheduler = make_scheduler(target)
    request = make_request(prompt(100), 30)
    serve(scheduler, request)
    for shorter in (0, 5):  # the prompt's last tokens opened the answer
        again = make_request((*prompt(100)[: 100 - shorter], *prompt(20, 1 + shorter)), 10)
        served = serve(scheduler, again)
        assert served.stats(again).cached_prompt_tokens == 100 - shorter
        assert_said(graph, served, again)


def test_a_beginning_in_common_is_read_twice_and_then_no_more(graph: Path) -> None:
    target = Target(graph, slots=1)
    scheduler = make_scheduler(target)
    common = prompt(130)
    for count in range(4):
        request = make_request((*common, *prompt(40, count)), 8)
        served = serve(scheduler, request)
        assert served.stats(request).cached_prompt_tokens == (130 if count > 1 else 0)
        assert_said(graph, served, request)


def test_long_prompts_leave_snapshots_at_fixed_places(graph: Path) -> None:
    target = Target(graph, slots=1)
    scheduler = make_scheduler(target)
    text = prompt(2 * INTERVAL + 100)
    serve(scheduler, make_request(text, 4))
    request = make_request((*text[: 2 * INTERVAL], *prompt(30, 1)), 8)
    served = serve(scheduler, request)
    assert served.stats(request).cached_prompt_tokens == 2 * INTERVAL
    assert_said(graph, served, request)


def test_an_answer_leaves_a_snapshot_only_at_its_end(graph: Path) -> None:
    """A copy of many megabytes would hold up everybody's next token."""
    target = Target(graph, slots=1)
    kept = target.cache.recurrent
    assert kept is not None
    serve(make_scheduler(target), make_request(prompt(INTERVAL - 5), 20))
    assert kept.snapshots == 2  # the prompt's end is the other


@pytest.mark.parametrize("behind", [1, 9])
def test_texts_may_part_before_a_prompts_end_wherever_its_pieces_end(
    graph: Path, behind: int
) -> None:
    scheduler = make_scheduler(Target(graph, slots=1))
    text = prompt(INTERVAL + behind)
    serve(scheduler, make_request(text, 4))
    request = make_request((*text[:-12], *prompt(30, 1)), 8)
    served = serve(scheduler, request)
    assert served.stats(request).cached_prompt_tokens == len(text) - 12
    assert_said(graph, served, request)


@every_model
def test_preempted_requests_go_on_with_the_same_text(graph: Path) -> None:
    target = Target(graph, num_blocks=6)
    scheduler = make_scheduler(target)
    requests = [make_request(prompt(50, seed), 120, sampling=SAMPLINGS[1]) for seed in range(3)]
    served = serve(scheduler, *requests)
    assert sum(served.stats(request).preemptions for request in requests)
    assert_said(graph, served, *requests)


def test_a_long_prompt_takes_no_snapshot_from_others_on_its_way(graph: Path) -> None:
    target = Target(graph, slots=2)
    scheduler = make_scheduler(target)
    texts = [prompt(100, 1), prompt(100, 2), prompt(100, 3), prompt(3 * INTERVAL + 50)]
    for text in texts:  # each leaves one at its end and one behind its answer: of eight, all
        serve(scheduler, make_request(text, 4))
    for text in texts:
        assert target.cache.allocate(0, (*text, 0)) == len(text)
        target.cache.release(0)


def test_prompts_are_cut_at_snapshots_only_where_they_are_shared(graph: Path) -> None:
    cache = Target(graph, slots=1).cache
    for share, border in ((False, None), (True, INTERVAL)):
        cache.allocate(0, prompt(600), share=share)
        assert cache.next_snapshot(0) == border
        cache.release(0)


@pytest.mark.parametrize("length", [200, 700])
def test_who_comes_with_the_same_prompt_waits_for_its_states(graph: Path, length: int) -> None:
    """As `n` answers to one prompt: others go on from the snapshot at the first one's end."""
    target = Target(graph, slots=4)
    requests = [make_request(prompt(length), 4) for _ in range(4)]
    served = serve(make_scheduler(target), *requests)
    assert_said(graph, served, *requests)
    assert target.computed == length + 3 * 1 + 4 * 3


@pytest.mark.parametrize("source", ["gemma4"], indirect=True, scope="module")
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
