"""What requests leave in the cache saves others work and changes no token of theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from specops.config import Settings
from specops.engine import Engine
from specops.request import (
    FinishReason,
    GenerationRequest,
    GenerationStats,
    Output,
    SamplingParams,
    StepResult,
)
from specops.rows import PrefixCache
from tests.conftest import CONTEXT, ROWS

SYSTEM = tuple(np.random.default_rng(5).integers(1, 320, 41).tolist())
_ids = count()


@pytest.fixture(scope="module", params=[(1, "same"), (ROWS, "same"), (ROWS, "int8")], ids=str)
def loaded(request: pytest.FixtureRequest, tiny_settings: Settings) -> Engine:
    """Its prompts are read by the graph that decodes, or by another one."""
    rows, prefill = request.param
    engine = Engine.load(replace(tiny_settings, rows=rows, prefill=prefill))
    assert engine.scheduler.target.one_graph == (prefill == "same")
    return engine


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    """Its rows are empty."""
    clear(loaded)
    yield loaded
    assert not loaded.scheduler.busy
    assert loaded.scheduler.rows.tokens == 0


def clear(engine: Engine) -> None:
    """Requests that keep nothing take every row once."""
    rows = engine.scheduler.rows
    rows.reuse = PrefixCache.OFF
    for _ in range(engine.info.rows):
        engine.scheduler.add(request((1,), max_new_tokens=1))
    run(engine)
    assert rows.kept_tokens == 0
    rows.reuse = PrefixCache.CLIENT


def request(prompt: tuple[int, ...], **fields: object) -> GenerationRequest:
    defaults: dict[str, object] = {"max_new_tokens": 12, "ignore_eos": True, "exact": True}
    return GenerationRequest(
        request_id=str(next(_ids)),
        prompt_tokens=prompt,
        **{**defaults, **fields},  # type: ignore[arg-type]
    )


def run(engine: Engine) -> list[StepResult]:
    steps = []
    while engine.scheduler.busy:
        steps.append(engine.scheduler.step())
    return steps


def tokens(outputs: list[Output]) -> tuple[int, ...]:
    return tuple(piece.token for output in outputs for piece in output.pieces)


def generate(engine: Engine, item: GenerationRequest) -> tuple[tuple[int, ...], GenerationStats]:
    outputs = list(engine.generate(item))
    stats = outputs[-1].stats
    assert stats is not None
    return tokens(outputs), stats


def afresh(engine: Engine, item: GenerationRequest) -> tuple[int, ...]:
    """What the request gets alone where nothing is kept."""
    rows = engine.scheduler.rows
    before, rows.reuse = rows.reuse, PrefixCache.OFF
    try:
        found, stats = generate(engine, replace(item, request_id=f"{item.request_id}-afresh"))
    finally:
        rows.reuse = before
    assert stats.cached_prompt_tokens == 0
    return found


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft", "cascade"])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(0.8, seed=3)], ids=["greedy", "sampled"]
)
def test_a_conversation_is_the_same_and_only_its_new_part_is_computed(
    engine: Engine, drafter: str, sampling: SamplingParams
) -> None:
    rng = np.random.default_rng(1)
    prompt, expected = SYSTEM, []
    turns = []
    for _ in range(4):
        item = request(prompt, drafter=drafter, k_draft=3, sampling=sampling)
        turns.append(item)
        expected.append(afresh(engine, item))
        prompt += expected[-1] + tuple(rng.integers(1, 320, int(rng.integers(1, 8))).tolist())
    held = 0
    for item, text in zip(turns, expected, strict=True):
        found, stats = generate(engine, item)
        assert found == text
        assert stats.cached_prompt_tokens == held
        held = len(item.prompt_tokens)
        if engine.scheduler.target.one_graph:  # else an answer is not what reading it would give
            held += len(text) - 1  # the last token was never fed


def test_a_beginning_of_any_length_gives_the_same_text(engine: Engine) -> None:
    """Wherever the cache's part ends: kernels that take tokens in pairs take others together."""
    prompt = tuple(np.random.default_rng(2).integers(1, 320, 60).tolist())
    item = request(prompt, max_new_tokens=20)
    expected = afresh(engine, item)
    for kept in range(8, 60):
        clear(engine)
        generate(engine, request((*prompt[:kept], 319), max_new_tokens=1))
        found, stats = generate(engine, replace(item, request_id=f"after {kept}"))
        assert stats.cached_prompt_tokens == min(kept, 59)
        assert found == expected


def test_steps_and_statistics_tell_what_was_saved(engine: Engine) -> None:
    first, second = request(SYSTEM), request((*SYSTEM, 7, 8))
    for item in (first, second):
        engine.scheduler.add(item)
        steps = run(engine)
    (stats,) = (output.stats for step in steps for output in step.outputs if output.stats)
    passes = [item for step in steps for item in step.stats]
    assert stats.cached_prompt_tokens == sum(item.cached_tokens for item in passes) == len(SYSTEM)
    assert sum(item.prompt_tokens for item in passes) == 2
    assert steps[-1].kv_tokens == 0
    assert steps[-1].kept_tokens >= len(SYSTEM) + 2 + 11
    assert engine.info.kv_capacity_tokens >= steps[-1].kept_tokens


def test_the_draft_model_reads_no_prompt_twice(engine: Engine) -> None:
    draft = engine.scheduler.drafters["draft"]._decoder  # type: ignore[attr-defined]
    fed: list[int] = []
    extend = draft.extend

    def counting(row: int, tokens: list[int], *, logits: int | None = None) -> object:
        fed.append(len(tokens))
        return extend(row, tokens, logits=logits)

    draft.extend = counting
    try:
        for number in range(2):
            fed.clear()
            item = request((*SYSTEM, 300 + number), drafter="draft", k_draft=2, max_new_tokens=4)
            generate(engine, item)
            assert sum(fed) < len(SYSTEM) or number == 0
    finally:
        draft.extend = extend


def test_a_draft_model_that_has_missed_a_prompt_reads_it_in_chunks(engine: Engine) -> None:
    """The target takes it from an earlier request that had no draft."""
    expected = afresh(engine, item := request((*SYSTEM, *SYSTEM, 9), drafter="draft", k_draft=3))
    generate(engine, request((*SYSTEM, *SYSTEM), max_new_tokens=1))
    engine.scheduler.add(item)
    draft = engine.scheduler.drafters["draft"]
    lags = []
    outputs: list[Output] = []
    while engine.scheduler.busy:
        result = engine.scheduler.step()
        outputs += result.outputs
        lags.append(draft.backlog(0, 2 * len(SYSTEM)))
    assert tokens(outputs) == expected
    assert lags[:6] == [82, 66, 50, 34, 18, 2]  # 16 at a time, after the first token


@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_and_goes_everybody_gets_the_same(engine: Engine, seed: int) -> None:
    """Conversations, shared beginnings, drafters, exact or not, arrivals and leavings at random."""
    rng = np.random.default_rng(seed)
    scheduler = engine.scheduler
    outputs: dict[str, list[Output]] = {}
    items: dict[str, GenerationRequest] = {}
    texts = [SYSTEM]
    cached = 0
    for _ in range(300):
        if len(items) < 30 and rng.random() < 0.3:
            text = texts[rng.integers(len(texts))]
            more = tuple(rng.integers(1, 320, int(rng.integers(1, 20))).tolist())
            prompt = (text[: rng.integers(1, len(text) + 1)] + more)[: CONTEXT - 25]
            item = request(
                prompt,
                exact=bool(rng.random() < 0.7),
                drafter=str(rng.choice(["none", "ngram", "draft"])),
                k_draft=int(rng.integers(1, 6)),
                max_new_tokens=int(rng.integers(1, 20)),
                client=str(rng.choice(["", "ann"])),
            )
            items[item.request_id], outputs[item.request_id] = item, []
            scheduler.add(item)
        if items and rng.random() < 0.05:
            scheduler.cancel(str(rng.choice(list(items))))
        for output in scheduler.step().outputs:
            outputs[output.request_id].append(output)
            if output.stats is not None:
                cached += output.stats.cached_prompt_tokens
                item = items[output.request_id]
                texts.append(item.prompt_tokens + tokens(outputs[output.request_id]))
    for result in run(engine):
        for output in result.outputs:
            outputs[output.request_id].append(output)
    assert cached > 0
    for name, item in items.items():
        assert outputs[name][-1].finish is not None
        if not item.exact:
            continue
        found, expected = tokens(outputs[name]), afresh(engine, item)
        if outputs[name][-1].finish is FinishReason.CANCELLED:
            assert found == expected[: len(found)]
        else:
            assert found == expected


def test_nothing_is_kept_where_it_is_turned_off(tiny_settings: Settings) -> None:
    engine = Engine.load(replace(tiny_settings, prefix_cache="off"))
    for _ in range(2):
        _, stats = generate(engine, request(SYSTEM, drafter="draft", k_draft=2))
        assert stats.cached_prompt_tokens == 0
    draft = engine.scheduler.drafters["draft"]._decoder  # type: ignore[attr-defined]
    assert engine.scheduler.target.cache.tokens == draft.cache.tokens == 0
