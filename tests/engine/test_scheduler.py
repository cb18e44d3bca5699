"""Requests through the scheduler: one pass per step, and what each would get alone."""

from dataclasses import replace

import pytest

from specops.engine.scheduler import Scheduler
from specops.request import (
    GRAMMAR,
    TARGET,
    FinishReason,
    Grammar,
    GrammarKind,
    SamplingParams,
    Step,
    StepKind,
)
from specops.speculation.drafters.base import Drafter
from specops.speculation.drafters.suffix import SuffixDrafter
from tests.simulated_target import (
    Rest,
    Served,
    SimulatedTarget,
    Text,
    expected,
    make_request,
    make_scheduler,
    make_state,
    serve,
    tokenizer,
)
from tests.speculation.drafters.scripted import Scripted, ScriptedModel

SEEDED = SamplingParams(1.5, top_k=8, top_p=0.95, seed=5)
DRAFTERS = ("none", "right", "wrong", "half", "model", "suffix")


def drafters(text: Text) -> list[Drafter]:
    """Always right, always wrong, as it comes, and one that runs a model."""
    return [
        Scripted(text, 1.0, name="right"),
        Scripted(text, 0.0, name="wrong"),
        Scripted(text, 0.6, name="half", silent=0.2),
        ScriptedModel(text, 0.8, name="model"),
        SuffixDrafter(),
    ]


def made(**fields: object) -> tuple[SimulatedTarget, Scheduler]:
    """A target and a scheduler with all drafters."""
    target = SimulatedTarget(**fields)  # type: ignore[arg-type]
    return target, make_scheduler(target, drafters(target.text))


def passes(served: Served) -> list[Step]:
    return [step for step in served.results if step.kind is not None]


# -- what a pass holds -----------------------------------------------------------------------------


def test_decoding_and_verifying_come_first_and_prompts_fill_the_pass() -> None:
    target, scheduler = made(max_tokens=96)
    served = Served()
    scheduler.add(make_request(5, 40, drafter="right", k_draft=4))
    scheduler.add(make_request(6, 40))
    served.step(scheduler)
    scheduler.add(make_request(500, 1))
    result = served.step(scheduler)
    spans = target.passes[-1].spans
    assert [(len(span.tokens), span.num_logits) for span in spans] == [(5, 5), (1, 1), (90, 0)]
    assert result.kind is StepKind.MIXED
    assert result.budget_tokens == result.prompt_tokens == 90
    assert result.decoding == 2


def test_a_pass_has_no_more_rows_of_logits_than_are_planned() -> None:
    """Neither for drafts, nor for the probabilities of prompts and of certain tokens."""
    target = SimulatedTarget(max_tokens=96)
    scheduler = make_scheduler(target, drafters(target.text), most_rows=24)
    grammar = Grammar(GrammarKind.REGEX, "(a{20}|b{20})+")
    probabilities = {"logprobs": 1, "prompt_logprobs": 1}
    requests = [
        make_request(70, 30, drafter="right", k_draft=8, adaptive=False, **kind)
        for kind in ({}, {}, probabilities, {"sampling": SamplingParams(grammar=grammar)})
    ]
    serve(scheduler, *requests)
    assert 24 <= max(batch.num_logits for batch in target.passes) <= 32


def test_prompts_share_a_pass_and_each_of_them_gets_its_first_token() -> None:
    target, scheduler = made(max_tokens=96)
    requests = [make_request(length, 3) for length in (10, 20, 30, 40)]
    served = Served()
    for request in requests:
        scheduler.add(request)
    first = served.step(scheduler)
    assert [len(span.tokens) for span in target.passes[0].spans] == [10, 20, 30, 36]
    assert [span.num_logits for span in target.passes[0].spans] == [1, 1, 1, 0]
    assert (first.kind, first.first_tokens) == (StepKind.PREFILL, 3)
    assert {output.request_id for output in first.outputs} == {
        request.request_id for request in requests[:3]
    }
    served.step(scheduler)
    assert [len(span.tokens) for span in target.passes[1].spans] == [1, 1, 1, 4]


def test_a_request_for_no_tokens_computes_its_prompt_for_those_after_it() -> None:
    _, scheduler = made(max_tokens=96)
    prompt = tuple(range(1, 201))
    warming = serve(scheduler, make_request(prompt, 0))
    (last,) = [output for step in warming.results for output in step.outputs]
    assert (last.pieces, last.finish) == ((), FinishReason.LENGTH)
    assert last.stats
    assert last.stats.generated_tokens == 0
    assert sum(step.prompt_tokens for step in warming.results) == 200
    served = serve(scheduler, make_request(prompt, 1))
    assert sum(step.prompt_tokens for step in served.results) < 200 // 4


def test_lookups_draft_from_the_prompt_in_the_first_pass_after_it() -> None:
    target = SimulatedTarget()
    scheduler = make_scheduler(target, [SuffixDrafter()])
    line = make_request(12).prompt_tokens
    scheduler.add(
        make_request(
            (*line, *make_request(9).prompt_tokens, *line[:4]), 9, drafter="suffix", k_draft=4
        )
    )
    scheduler.step()
    state = scheduler.running[0]
    state.tokens[-1] = line[4]  # as a model answers that repeats the line
    scheduler.step()
    assert target.passes[1].spans[0].tokens == list(line[4:9])


def test_kinds_of_passes_are_told_apart() -> None:
    _, scheduler = made()
    kinds = []
    scheduler.add(make_request(8, 6, drafter="right", k_draft=2))
    for _ in range(2):
        kinds.append(scheduler.step().kind)
    scheduler.add(make_request(8, 6))
    while scheduler.busy:
        kinds.append(scheduler.step().kind)
    assert [kind for kind in kinds if kind] == [
        StepKind.PREFILL,
        StepKind.VERIFY,
        StepKind.MIXED,
        *[StepKind.DECODE] * 5,
    ]


# -- the output ------------------------------------------------------------------------------------


def test_the_outputs_origin_is_told() -> None:
    _, scheduler = made()
    request = make_request(20, 40, drafter="half", k_draft=4)
    served = serve(scheduler, request)
    outputs = served.outputs[request.request_id]
    stats = outputs[-1].stats
    origins = [piece.origin for output in outputs for piece in output.pieces]
    assert origins[0] == TARGET
    assert origins.count("half") == stats.accepted_tokens > 0
    assert origins.count(TARGET) == 1 + stats.sequence_steps
    assert stats.tokens_per_pass == pytest.approx(39 / stats.sequence_steps)


@pytest.mark.parametrize(
    ("stream", "slowness", "tokens"),
    [
        (True, 0.001, [1] * 9),  # a client reads each step's
        (False, 0.001, [1, 8]),  # nobody does: the first token, then those of 20 ms together
        (False, 2.0, [1] * 9),  # a pass takes longer
    ],
)
def test_output_is_gathered_where_nobody_streams(
    stream: bool, slowness: float, tokens: list[int]
) -> None:
    _, scheduler = made(slowness=slowness)
    request = make_request(5, 9, stream=stream)
    outputs = serve(scheduler, request).outputs[request.request_id]
    assert [len(output.pieces) for output in outputs] == tokens


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_context_can_be_filled_to_its_end(drafter: str) -> None:
    context = 150  # no whole number of blocks
    target = SimulatedTarget(context=context)
    scheduler = make_scheduler(target, drafters(target.text))
    requests = [
        make_request(context - output, output, drafter=drafter, k_draft=8) for output in (1, 2, 20)
    ]
    served = serve(scheduler, *requests)
    for request in requests:
        assert served.tokens(request) == expected(target.text, request)


@pytest.mark.parametrize("drafter", ["none", "right", "model"])
def test_an_end_token_among_accepted_draft_tokens_ends_the_text(drafter: str) -> None:
    target = SimulatedTarget()
    options = {"drafter": drafter, "k_draft": 8}
    request = make_request(20, 60, ignore_eos=False, **options)
    plain = expected(target.text, request)
    end = plain[21]
    cut = plain.index(end) + 1
    scheduler = make_scheduler(target, drafters(target.text), end_tokens=frozenset({end}))
    ignoring = replace(request, request_id="ignoring", ignore_eos=True)
    served = serve(scheduler, request, ignoring)
    assert served.tokens(request) == plain[:cut]
    assert served.finish(request) is FinishReason.STOP
    assert served.tokens(ignoring) == plain
    stats = served.stats(request)
    assert stats.accepted_tokens + stats.sequence_steps in (cut - 1, cut)
    assert target.cache.used_blocks == 0


@pytest.mark.parametrize("drafter", ["none", "right", "half"])
def test_a_stop_string_among_accepted_draft_tokens_ends_the_text(drafter: str) -> None:
    target, scheduler = made(text=Text(surprise=1.0))
    plain = make_request(20, 60)
    pieces = [
        piece.text
        for output in serve(scheduler, plain).outputs[plain.request_id]
        for piece in output.pieces
    ]
    text = "".join(pieces)
    stop = text[30:33]
    needed = next(n for n in range(60) if stop in "".join(pieces[:n]))
    request = replace(plain, request_id="stopped", stop=(stop,), drafter=drafter, k_draft=8)
    served = serve(scheduler, request)
    found = "".join(output.text for output in served.outputs["stopped"])
    assert found == text[: text.index(stop)]
    assert served.finish(request) is FinishReason.STOP
    stats = served.outputs["stopped"][-1].stats
    assert stats.generated_tokens == needed
    assert target.cache.used_blocks == 0


# -- counts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_counts_add_up(drafter: str, adaptive: bool) -> None:
    """Tokens, steps, drafts: the same in the requests' statistics and in the passes'."""
    target = SimulatedTarget(num_slots=3)
    scheduler = make_scheduler(target, drafters(target.text))
    shared = make_request(100).prompt_tokens
    requests = [
        make_request(
            (*shared, *[index] * (30 * index)),
            20 + index,
            drafter=drafter,
            k_draft=4,
            adaptive=adaptive,
        )
        for index in range(1, 8)
    ]
    served = serve(scheduler, *requests)
    steps = passes(served)
    stats = [served.stats(request) for request in requests]

    def counted(name: str) -> int:
        return sum(getattr(step, name) for step in steps)

    def told(name: str) -> int:
        return sum(getattr(item, name) for item in stats)

    assert told("generated_tokens") == counted("emitted_tokens")
    assert told("generated_tokens") == sum(request.max_new_tokens for request in requests)
    assert told("sequence_steps") == counted("decoding")
    assert told("draft_tokens") == counted("draft_tokens")
    assert told("accepted_tokens") == counted("accepted_tokens")
    assert told("drafts") == sum(len(step.drafts) for step in steps)
    assert told("draft_misses") == sum(len(step.missed_drafters) for step in steps)
    assert told("cached_prompt_tokens") == counted("cached_tokens") > 0
    assert told("prompt_tokens") == counted("prompt_tokens") + counted("cached_tokens")
    assert counted("first_tokens") == len(requests)
    assert told("sequence_steps") + told("accepted_tokens") == told("generated_tokens") - 7
    for item in stats:
        assert item.accepted_tokens == sum(item.accepted_per_position)
        assert item.accepted_tokens == sum(item.accepted_found_in.values())
        assert sorted(item.accepted_per_position, reverse=True) == list(item.accepted_per_position)
    tokens = sum(batch.num_tokens for batch in target.passes)
    assert tokens == counted("prompt_tokens") + counted("decoding") + counted("draft_tokens")
    assert all(step.prompt_tokens <= step.budget_tokens for step in steps)
    asked = sum(len(step.drafts) + len(step.missed_drafters) for step in steps)
    declined = sum(len(step.declined_drafters) for step in steps)
    if drafter == "none":
        assert asked == declined == 0
    else:  # but for steps that had no room for a draft token
        assert counted("decoding") - len(requests) <= asked + declined <= counted("decoding")
        assert adaptive or not declined


def test_a_prompt_that_gets_no_room_is_counted_once() -> None:
    """It waits for a long one for many passes, with a part of it in the cache."""
    _, scheduler = made(max_tokens=96)
    shared = make_request(128).prompt_tokens
    serve(scheduler, make_request(shared, 1))
    late = make_request((*shared, 5, 6, 7), 1)
    served = serve(scheduler, make_request(600, 1), late)
    steps = passes(served)
    assert sum(step.cached_tokens for step in steps) == 128
    stats = served.stats(late)
    assert stats.cached_prompt_tokens == 128


def test_drafting_that_never_helps_is_declined() -> None:
    """The controller's choice is told: what a histogram of choices is made from."""
    _, scheduler = made()
    served = serve(scheduler, make_request(9, 80, drafter="wrong", k_draft=4, adaptive=True))
    declined = [name for step in passes(served) for name in step.declined_drafters]
    assert set(declined) == {"wrong"}
    assert len(declined) > 50


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_controller_chooses_neither_fixed_drafts_nor_those_of_grammars(adaptive: bool) -> None:
    target = SimulatedTarget(text=Text(vocab_size=4096))
    scheduler = make_scheduler(target, [Scripted(target.text, 1.0)], end_tokens=frozenset({0}))
    follows = SamplingParams(grammar=Grammar(GrammarKind.CHOICE, '["one answer, and no other"]'))
    drafting = {"drafter": "scripted", "k_draft": 3, "adaptive": adaptive}
    free, constrained = (
        make_request(8, 40, **drafting),
        make_request(8, 20, sampling=follows, **drafting),
    )
    served = serve(scheduler, free, constrained)
    drafts = {(draft.drafter, draft.adaptive) for step in served.results for draft in step.drafts}
    assert drafts == {("scripted", adaptive), (GRAMMAR, False)}


def test_the_times_of_a_request_are_those_of_the_clock() -> None:
    target = SimulatedTarget(num_slots=1, rest=Rest(0, 0, 0, 0))
    scheduler = make_scheduler(target)
    target.clock.now = 5.0
    first, second = (make_request(200, 10, arrival=5.0) for _ in range(2))
    scheduler.add(first)
    scheduler.add(second)
    served, moments = Served(), {}
    while scheduler.busy:
        for output in served.step(scheduler).outputs:
            moments.setdefault(output.request_id, []).append(target.clock.now)
    for request in (first, second):
        stats = served.stats(request)
        begun, *_, ended = moments[request.request_id]
        assert 5.0 + stats.queue_seconds + stats.prefill_seconds == pytest.approx(begun)
        assert stats.decode_seconds == pytest.approx(ended - begun)
    assert stats.queue_seconds == pytest.approx(moments[first.request_id][-1] - 5.0)


# -- requests that end early -----------------------------------------------------------------------


@pytest.mark.parametrize("where", ["waiting", "prefilling", "decoding", "verifying"])
def test_a_cancelled_request_frees_its_blocks_within_a_step(where: str) -> None:
    target = SimulatedTarget(num_slots=3, max_tokens=32)
    scheduler = make_scheduler(target, drafters(target.text))
    others = [make_request(20, 40, drafter="half", k_draft=3) for _ in range(3)]
    before = others if where == "waiting" else others[:2]
    drafter = "model" if where == "verifying" else "none"
    leaving = make_request(300 if where == "prefilling" else 20, 40, drafter=drafter, k_draft=3)
    served = Served()
    for request in (*before, leaving):
        scheduler.add(request)
    for _ in range(5):
        served.step(scheduler)
    scheduler.cancel(leaving.request_id)
    result = served.step(scheduler)
    assert served.finish(leaving) is FinishReason.CANCELLED
    assert result.running == len(scheduler.running) == len(before)
    assert len(scheduler.waiting) == 0
    held = sum(-(-len(sequence.tokens) // 64) for sequence in scheduler.running)
    assert target.cache.used_blocks <= held
    while scheduler.busy:
        served.step(scheduler)
    for request in before:
        assert served.tokens(request) == expected(target.text, request)
    assert served.tokens(leaving) == expected(target.text, leaving)[: len(served.tokens(leaving))]
    assert target.cache.used_blocks == target.cache.tokens == 0


@pytest.mark.parametrize("passes", [1, 5])
def test_no_pass_is_run_for_a_request_whose_client_has_left(passes: int) -> None:
    target = SimulatedTarget(max_tokens=32)
    scheduler = make_scheduler(target)
    leaving = make_request(100, 40)
    scheduler.add(leaving)
    for _ in range(passes):
        scheduler.step()
    scheduler.cancel(leaving.request_id)
    (output,) = scheduler.step().outputs
    assert (output.finish, len(target.passes)) == (FinishReason.CANCELLED, passes)
    assert not scheduler.busy


def test_a_request_ends_with_what_it_has_once_its_time_to_predict_is_over() -> None:
    target = SimulatedTarget(num_slots=1)
    request = make_request(90, 400, predict_seconds=0.1)
    served = serve(make_scheduler(target), make_request(20, 50), request)  # the wait does not count
    stats = served.stats(request)
    assert served.finish(request) is FinishReason.LENGTH
    assert 0.1 <= stats.decode_seconds < 0.12
    tokens = served.tokens(request)
    assert 1 < len(tokens) == stats.generated_tokens < 10
    assert tokens == expected(target.text, request)[: len(tokens)]


def test_a_line_with_less_indentation_ends_the_text() -> None:
    state = make_state(make_request(4, 40, min_indent=2))
    tokens = list(tokenizer().encode("if a:\n  b\nc = 1"))
    emitted = state.append(tokens, "suffix", None, 0.0)
    output = state.output(0.0)
    assert output
    assert (output.text, output.finish, output.stop) == ("if a:\n  b", FinishReason.LENGTH, None)
    assert emitted < len(tokens)


@pytest.mark.parametrize("where", ["waiting", "prefilling", "decoding"])
def test_a_request_ends_at_its_deadline(where: str) -> None:
    target = SimulatedTarget(num_slots=1, max_tokens=32)
    scheduler = make_scheduler(target)
    served = Served()
    if where == "waiting":
        scheduler.add(make_request(5, 400))
    deadline = 0.5
    request = make_request(500 if where == "prefilling" else 20, 900, deadline=deadline)
    scheduler.add(request)
    while served.finish(request) is None:
        began = target.clock.now
        served.step(scheduler)
    assert served.finish(request) is FinishReason.TIMEOUT
    assert began > deadline >= began - 0.08  # at the first step after it, a step before it
    found = served.tokens(request)
    assert bool(found) == (where == "decoding")
    assert found == expected(target.text, request)[: len(found)]
    assert target.cache.used_blocks == (where == "waiting")
