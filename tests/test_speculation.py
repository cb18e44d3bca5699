"""Guesses and sampling together: a seed fixes the text, and no guess changes a distribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from specops.config import Settings
from specops.drafters.base import NO_DRAFT, Draft, LookupDrafter
from specops.drafters.cascade import CascadeDrafter
from specops.drafters.draft_model import DraftModelDrafter
from specops.engine import Engine
from specops.request import GenerationRequest, GenerationStats, SamplingParams, StepKind

PROMPT = (7, 8, 9, 7, 8, 9, 7, 8)
SEEDED = SamplingParams(6.0, top_k=8, top_p=0.95, seed=5)
_ids = count()


@pytest.fixture(scope="module")
def engine(tiny_settings: Settings) -> Engine:
    return Engine.load(tiny_settings)


def request(**fields: object) -> GenerationRequest:
    defaults: dict[str, object] = {
        "prompt_tokens": PROMPT,
        "max_new_tokens": 40,
        "sampling": SEEDED,
        "ignore_eos": True,
        "exact": True,
    }
    return GenerationRequest(
        request_id=str(next(_ids)),
        **{**defaults, **fields},  # type: ignore[arg-type]
    )


def run(engine: Engine, item: GenerationRequest) -> tuple[list[int], GenerationStats]:
    outputs = list(engine.generate(item))
    stats = outputs[-1].stats
    assert stats is not None
    return [piece.token for output in outputs for piece in output.pieces], stats


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[int]:
    """The seed's text where nobody guesses."""
    return run(engine, request())[0]


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft", "cascade"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_seed_fixes_the_text_whoever_guesses_how_much(
    engine: Engine, plain: list[int], drafter: str, adaptive: bool
) -> None:
    accepted = rejected = 0
    for k_draft in range(1, 9):
        item = request(drafter=drafter, k_draft=k_draft, adaptive=adaptive)
        tokens, stats = run(engine, item)
        assert tokens == plain, k_draft
        accepted += stats.accepted_tokens
        rejected += stats.draft_tokens - stats.accepted_tokens
    if drafter != "none" and not adaptive:
        assert accepted
        assert rejected


def test_another_seed_is_another_text(engine: Engine, plain: list[int]) -> None:
    assert run(engine, request(sampling=replace(SEEDED, seed=6)))[0] != plain


def test_without_a_seed_no_text_repeats(engine: Engine) -> None:
    item = request(sampling=replace(SEEDED, seed=None))
    assert run(engine, item)[0] != run(engine, replace(item, request_id="again"))[0]


def test_a_seed_fixes_the_text_among_other_requests(engine: Engine, plain: list[int]) -> None:
    kinds = [("draft", 3), ("none", 0), ("ngram", 5)]
    items = [request(drafter=drafter, k_draft=k) for drafter, k in kinds]
    items.append(request(sampling=replace(SEEDED, seed=None), drafter="draft", k_draft=2))
    found: dict[str, list[int]] = {item.request_id: [] for item in items}
    for item in items:
        engine.scheduler.add(item)
    while engine.scheduler.busy:
        for output in engine.scheduler.step().outputs:
            found[output.request_id] += [piece.token for piece in output.pieces]
    assert [found[item.request_id] for item in items[:-1]] == [plain] * 3


def test_a_seed_fixes_the_text_up_to_a_stop(engine: Engine, plain: list[int]) -> None:
    """An end token among accepted guesses ends the text where plain decoding does."""
    scheduler = engine.scheduler
    ends, scheduler._end_tokens = scheduler._end_tokens, frozenset({plain[20]})
    try:
        for drafter, k_draft in (("none", 0), ("ngram", 8), ("draft", 4)):
            item = request(drafter=drafter, k_draft=k_draft, ignore_eos=False)
            assert run(engine, item)[0] == plain[: plain.index(plain[20]) + 1]
    finally:
        scheduler._end_tokens = ends


@pytest.mark.parametrize("seeded", [False, True], ids=["random numbers", "seeds"])
@pytest.mark.parametrize("drafter", ["ngram", "draft", "cascade"])
def test_sampled_tokens_are_distributed_as_without_guesses(
    engine: Engine, drafter: str, seeded: bool
) -> None:
    """The third token, by which two verifications have decided, over 1,000 requests each."""

    def counts(name: str, k_draft: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        found = np.zeros(320, np.int64)
        for number in range(1000):
            seed = number + 10_000 * k_draft  # the same ones would give the same texts
            sampling = replace(SEEDED, seed=seed if seeded else None)
            item = request(sampling=sampling, drafter=name, k_draft=k_draft, max_new_tokens=3)
            engine.scheduler.add(item)
            list(engine.scheduler.waiting)[-1].rng = np.random.default_rng(seed)
            found[list(last_tokens(engine))[-1]] += 1
        return found

    table = np.stack([counts("none", 0), counts(drafter, 2)])
    common = table.sum(axis=0) >= 20
    rare = table[:, ~common].sum(axis=1, keepdims=True)
    table = np.concatenate([table[:, common], rare], axis=1)
    table = table[:, table.sum(axis=0) > 0]
    assert chi2_contingency(table).pvalue > 1e-3


def last_tokens(engine: Engine) -> Iterator[int]:
    """All that comes out until nobody is left."""
    while engine.scheduler.busy:
        for output in engine.scheduler.step().outputs:
            yield from (piece.token for piece in output.pieces)


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft", "cascade"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_every_step_was_guessed_for_or_missed_or_declined(
    engine: Engine, drafter: str, adaptive: bool
) -> None:
    """But for one of a request that had no room for a guess, one that its draft model read in."""
    items = [request(drafter=drafter, k_draft=4, adaptive=adaptive, exact=False) for _ in range(2)]
    for item in items:
        engine.scheduler.add(item)
    guessed = missed = declined = rows = 0
    while engine.scheduler.busy:
        for step in engine.scheduler.step().stats:
            if step.kind is StepKind.PREFILL:
                continue
            rows += step.rows
            guessed += step.draft_tokens > 0
            missed += len(step.missed_drafters)
            declined += len(step.declined_drafters)
            assert set(step.declined_drafters) <= set(engine.scheduler.drafters)
    if drafter == "none":
        assert guessed == missed == declined == 0
    else:
        assert rows - 2 * len(items) <= guessed + missed + declined <= rows
        assert adaptive or not declined


def test_guesses_that_never_come_true_are_declined(engine: Engine) -> None:
    """The controller's choice of no guess is told: what a histogram of choices is made from."""
    declined: list[str] = []
    for _ in range(8):
        hot = SamplingParams(50.0, seed=next(_ids))  # the next token is any of 320
        engine.scheduler.add(request(sampling=hot, drafter="draft", k_draft=4, adaptive=True))
        while engine.scheduler.busy:
            for step in engine.scheduler.step().stats:
                declined += step.declined_drafters
    assert set(declined) == {"draft"}
    assert engine.scheduler.controller.estimated_speedup >= 1


class Reader(LookupDrafter):
    """Notes what it is given to read, and guesses like a draft model: for a price."""

    name = "draft"
    runs_model = True

    def __init__(self) -> None:
        self.read: dict[int, list[int]] = {}
        self.calls: list[str] = []

    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        self.calls.append("prefill")
        self.read[row] = list(tokens)

    def look_up(self, row: int, tokens: Sequence[int], count: int) -> Draft:
        return NO_DRAFT

    def propose(
        self,
        row: int,
        tokens: Sequence[int],
        count: int,
        sampling: SamplingParams,
        rng: np.random.Generator,
    ) -> Draft:
        self.calls.append("propose")
        self.read[row] = list(tokens)
        return Draft((tokens[-1],) * count)

    def backlog(self, row: int, length: int) -> int:
        return length - len(self.read.get(row, ()))

    def release(self, row: int) -> None:
        self.read.pop(row, None)


LONG_PROMPT = tuple(range(1, 101))
CHUNK = 40


@pytest.fixture
def reader(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Reader:
    """Replaces the draft model; 40 prompt tokens are read at once."""
    reader = Reader()
    monkeypatch.setattr(engine.scheduler, "drafters", {"draft": reader})
    monkeypatch.setattr(engine.scheduler._pace, "draft_chunk", lambda decoding: CHUNK)
    return reader


def emitted(engine: Engine) -> int:
    """Tokens that one step brings."""
    return sum(step.emitted_tokens for step in engine.scheduler.step().stats)


def test_the_first_token_is_out_before_the_draft_model_reads_the_prompt(
    engine: Engine, reader: Reader
) -> None:
    engine.scheduler.add(
        request(prompt_tokens=LONG_PROMPT, max_new_tokens=20, drafter="draft", k_draft=2)
    )
    engine.scheduler.add(request(prompt_tokens=LONG_PROMPT, max_new_tokens=1))
    while not emitted(engine):
        assert reader.calls == []
    assert reader.calls == []
    list(last_tokens(engine))
    assert reader.calls[0] == "prefill"


def test_a_prompt_is_read_chunk_by_chunk_while_plain_tokens_come(
    engine: Engine, reader: Reader
) -> None:
    engine.scheduler.add(
        request(prompt_tokens=LONG_PROMPT, max_new_tokens=20, drafter="draft", k_draft=2)
    )
    while not emitted(engine):
        pass
    for read in (CHUNK, 2 * CHUNK):
        assert emitted(engine) == 1  # the target's own
        assert list(reader.read.values()) == [list(LONG_PROMPT[:read])]
    emitted(engine)
    assert reader.calls == ["prefill"] * 3 + ["propose"]
    list(last_tokens(engine))
    assert reader.calls.count("prefill") == 3


class Silent(LookupDrafter):
    """Never finds anything."""

    name = "ngram"

    def look_up(self, row: int, tokens: Sequence[int], count: int) -> Draft:
        return NO_DRAFT


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("exact", [False, True], ids=["shared pass", "pass of its own"])
def test_a_draft_model_that_still_reads_misses_nothing(
    engine: Engine, reader: Reader, monkeypatch: pytest.MonkeyPatch, exact: bool, adaptive: bool
) -> None:
    """Two rounds come before the last chunk is read; a lookup in them can miss, and is told."""
    scheduler, controller = engine.scheduler, engine.scheduler.controller
    scheduler.drafters["cascade"] = CascadeDrafter([Silent(), reader])
    monkeypatch.setattr(controller, "asks", lambda outlook, drafter: True)
    monkeypatch.setattr(controller, "pays", lambda drafter: True)
    monkeypatch.setattr(controller, "choose", lambda found: [one.most for one in found])
    for drafter, missed in (("draft", []), ("cascade", ["ngram", "ngram"])):
        reader.read.clear()
        scheduler.add(
            request(
                prompt_tokens=LONG_PROMPT,
                max_new_tokens=20,
                drafter=drafter,
                k_draft=2,
                adaptive=adaptive,
                exact=exact,
            )
        )
        results = []
        while scheduler.busy:
            results.append(scheduler.step())
        steps = [step for result in results for step in result.stats]
        stats = results[-1].outputs[-1].stats
        assert [name for step in steps for name in step.missed_drafters] == missed
        assert [name for step in steps for name in step.declined_drafters] == []
        assert stats is not None
        assert stats.draft_misses == len(missed)
        # Two steps before it had read; the last of all may have had no room for a guess.
        assert stats.sequence_steps - 3 <= stats.drafts <= stats.sequence_steps - 2


def test_one_prompt_is_read_at_a_time(engine: Engine, reader: Reader) -> None:
    for _ in range(2):
        engine.scheduler.add(
            request(prompt_tokens=LONG_PROMPT, max_new_tokens=20, drafter="draft", k_draft=2)
        )
    while engine.scheduler.busy:
        before = reader.calls.count("prefill")
        engine.scheduler.step()
        assert reader.calls.count("prefill") - before <= 1
    assert reader.calls.count("prefill") == 6


def test_no_prompt_is_read_for_guesses_that_have_not_paid_or_have_no_room(
    engine: Engine, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = request(prompt_tokens=LONG_PROMPT, drafter="draft", k_draft=2, max_new_tokens=2)
    assert len(run(engine, two)[0]) == 2  # the last token is never guessed
    assert reader.calls == []
    monkeypatch.setattr(engine.scheduler.controller, "pays", lambda drafter: False)
    run(
        engine,
        request(
            prompt_tokens=LONG_PROMPT, max_new_tokens=20, drafter="draft", k_draft=2, adaptive=True
        ),
    )
    assert "prefill" not in reader.calls


def test_a_prompt_that_was_caught_up_with_is_not_read_again(
    engine: Engine, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guesses came to pay while the request was running, after its drafter had to catch up."""
    controller = engine.scheduler.controller
    monkeypatch.setattr(controller, "pays", lambda drafter: bool(reader.calls))
    monkeypatch.setattr(controller, "choose", lambda found: [min(item.most, 2) for item in found])
    item = request(
        prompt_tokens=LONG_PROMPT, max_new_tokens=20, drafter="draft", k_draft=2, adaptive=True
    )
    monkeypatch.setattr(controller, "asks", lambda outlook, drafter: True)
    run(engine, item)
    assert set(reader.calls) == {"propose"}


def test_a_draft_model_that_read_in_chunks_holds_the_whole_prompt(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.scheduler._pace, "draft_chunk", lambda decoding: CHUNK)
    draft = engine.scheduler.drafters["draft"]
    assert isinstance(draft, DraftModelDrafter)
    engine.scheduler.add(
        request(prompt_tokens=LONG_PROMPT, max_new_tokens=20, drafter="cascade", k_draft=2)
    )
    while not engine.scheduler.rows.decoding:
        engine.scheduler.step()
    place = engine.scheduler.rows.decoding[0].number
    held = [len(draft._fed.get(place, ()))]
    while held[-1] < len(LONG_PROMPT):
        engine.scheduler.step()
        held.append(len(draft._fed[place]))
    assert held[:3] == [0, CHUNK, 2 * CHUNK]
    assert draft._fed[place][: len(LONG_PROMPT)] == list(LONG_PROMPT)
    assert draft._decoder.cache.lengths[place] == held[-1]
    list(last_tokens(engine))
