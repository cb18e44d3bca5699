"""Answers follow their grammar, and drafts change nothing about it."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from specops.engine.scheduler import Scheduler
from specops.request import FinishReason, GenerationRequest, Grammar, GrammarKind, SamplingParams
from specops.runtime.sampling import filtered_probs
from specops.speculation.drafters.base import Draft, DraftContext, Drafter, LookupDrafter
from tests.simulated_target import (
    Served,
    SimulatedTarget,
    Text,
    make_request,
    make_scheduler,
    serve,
)

TEXT = Text(vocab_size=4096)  # all tokens of the demo pair
PATTERN = r"([a-z]{2,4}-){4}(left|right)[0-9]{1,3};"
GRAMMAR = Grammar(GrammarKind.REGEX, PATTERN)
GREEDY = SamplingParams(grammar=GRAMMAR)
SEEDED = SamplingParams(0.9, top_k=400, seed=7, grammar=GRAMMAR)
PROMPT = tuple(range(40, 52))
ENDS = frozenset({0})


class Known(LookupDrafter):
    """Proposes what it knows to follow, with a wrong token now and then."""

    name = "known"

    def __init__(self, tokens: Sequence[int], right: float) -> None:
        self._tokens, self._right = tuple(tokens), right
        self._rng = np.random.default_rng(5)

    def look_up(self, context: DraftContext) -> Sequence[int]:
        start = len(context.text) - len(PROMPT)
        found = np.array(self._tokens[start : start + context.max_draft], int)
        wrong = self._rng.random(len(found)) >= self._right
        return np.where(wrong, found ^ 1, found).tolist()  # type: ignore[no-any-return]


class Drawing(Drafter):
    """Draws as a draft model does: from a distribution of its own that knows no grammar.

    One that `leaves_out` what the grammar forbids does what the engine must not do.
    """

    def __init__(self, name: str, *, leaves_out: bool = False) -> None:
        self.name = name  # type: ignore[misc]
        self._leaves_out = leaves_out

    def propose(self, requests: Sequence[DraftContext]) -> list[Draft]:
        drafts = []
        for item in requests:
            logits = np.random.default_rng(9).standard_normal((item.max_draft, 4096)) * 0.1
            logits[:, SIGNS] += (25, 18, 24, 20)
            probs = filtered_probs(logits.astype(np.float32), item.sampling)
            tokens = [int(item.rng.choice(4096, p=row / row.sum())) for row in probs]
            if self._leaves_out and tokens[0] not in SIGNS[1:]:
                tokens = []
            drafts.append(Draft(tuple(tokens), probs, accept_probs=(0.5,) * len(tokens)))
        return drafts


SIGNS = [32, 94, 62, 64]  # "@", "~", "^", "`"


def made(*drafters: Drafter) -> Scheduler:
    target = SimulatedTarget(text=TEXT)
    return make_scheduler(target, drafters, end_tokens=ENDS)


def request(sampling: SamplingParams, **fields: object) -> GenerationRequest:
    return make_request(PROMPT, **{"output": 60, "ignore_eos": False, **fields}, sampling=sampling)


def text(served: Served, asked: GenerationRequest) -> str:
    return "".join(output.text for output in served.outputs[asked.request_id])


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, replace(SEEDED, seed=None)])
def test_an_answer_matches_its_grammar_and_stops_there(sampling: SamplingParams) -> None:
    asked = request(sampling)
    served = serve(made(), asked)
    assert re.fullmatch(PATTERN, text(served, asked))
    assert served.finish(asked) is FinishReason.STOP


def test_a_grammar_that_may_end_ends_by_an_end_token() -> None:
    """Also where end tokens do not count: nothing else says that the answer is complete."""
    grammar = Grammar(GrammarKind.REGEX, "(ab)*c?")
    asked = request(SamplingParams(1.5, seed=1, grammar=grammar), ignore_eos=True)
    served = serve(made(), asked)
    assert served.finish(asked) is FinishReason.STOP
    assert re.fullmatch("(ab)*c?", text(served, asked))


FORM = Grammar(
    GrammarKind.REGEX,
    r'\{"first name": "[a-z]{1,5}", "family name": "[a-z]{1,5}", "ok": (true|no)\}',
)


@pytest.mark.parametrize("sampling", [SamplingParams(), replace(SEEDED, top_k=0)])
@pytest.mark.parametrize("told", [{}, {"logprobs": 2}, {"logprobs": 2, "drawn_logprobs": True}])
def test_what_the_grammar_forces_needs_no_step_of_its_own(
    sampling: SamplingParams, told: dict[str, Any]
) -> None:
    sampling = replace(sampling, grammar=FORM)
    plain = request(sampling, **told)
    expected = serve(made(), plain)
    pieces = [piece for output in expected.outputs[plain.request_id] for piece in output.pieces]
    for known, right in (((), 1.0), ([piece.token for piece in pieces], 0.7)):
        asked = request(sampling, **told, drafter="known", k_draft=3, adaptive=False)
        served = serve(made(Known(known, right)), asked)
        found = [piece for output in served.outputs[asked.request_id] for piece in output.pieces]
        assert [piece._replace(origin="") for piece in found] == [
            piece._replace(origin="") for piece in pieces
        ]
        forced = [piece for piece in found if piece.origin == "grammar"]
        assert '"family name": "' in "".join(piece.text for piece in found)
        assert len(forced) > len(found) / 3
        stats = served.stats(asked)
        assert stats.sequence_steps < len(found) - len(forced) + 1
        drafts = [item for result in served.results for item in result.drafts]
        mine = [item for item in drafts if item.drafter == "grammar"]
        assert sum(len(item.tokens) for item in mine) == len(forced)
        assert sum(item.accepted for item in drafts) == stats.accepted_tokens
        assert {piece.origin for piece in found} <= {"grammar", "known", "target"}


def test_plain_decoding_computes_what_is_forced_token_by_token() -> None:
    """As it is asked for by name, or by no draft tokens: the measure of all others."""
    for fields in ({}, {"drafter": "known", "k_draft": 0}):
        asked = request(SamplingParams(grammar=FORM), **fields)
        served = serve(made(Known((), 1.0)), asked)
        assert served.stats(asked).sequence_steps == served.stats(asked).generated_tokens - 1


@pytest.mark.parametrize("most", range(1, 40, 4))
def test_forced_tokens_overrun_neither_the_limit_nor_the_pass(most: int) -> None:
    plain = request(SamplingParams(grammar=FORM), output=most)
    tokens = serve(made(), plain).tokens(plain)
    requests = [
        request(SamplingParams(grammar=FORM), output=most, drafter="known", k_draft=2)
        for _ in range(8)
    ]
    target = SimulatedTarget(text=TEXT, max_tokens=8 * 5)
    served = serve(make_scheduler(target, [Known(tokens, 1.0)], end_tokens=ENDS), *requests)
    for asked in requests:
        assert served.tokens(asked) == tokens


def test_probabilities_are_the_targets_own() -> None:
    """Whatever the grammar allows: as they are for a request without one."""
    asked = request(GREEDY, logprobs=1)
    served = serve(made(), asked)
    pieces = [piece for output in served.outputs[asked.request_id] for piece in output.pieces]
    free = make_request(PROMPT, 1, sampling=SamplingParams(), logprobs=1)
    (first,) = [
        piece for output in serve(made(), free).outputs[free.request_id] for piece in output.pieces
    ]
    assert pieces[0].token != first.token
    assert pieces[0].logprob is not None
    assert first.logprob is not None
    assert pieces[0].logprob.top == first.logprob.top


def drawn(drafter: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """How often each token is second, of 700 answers of three signs that are no "@"."""
    grammar = Grammar(GrammarKind.REGEX, "[~^`]{3}")
    sampling = SamplingParams(2.0, grammar=grammar)
    scheduler = made(Drawing("drawing"), Drawing("leaving", leaves_out=True))
    requests = [request(sampling, drafter=drafter, k_draft=1, output=3) for _ in range(700)]
    for asked in requests:
        scheduler.add(asked)
    for number, sequence in enumerate(scheduler.waiting):
        sequence.rng = np.random.default_rng([number, len(drafter)])
    served = serve(scheduler)
    found = np.zeros(4096, np.int64)
    for asked in requests:
        found[served.tokens(asked)[1]] += 1
    return found[found > 0]


def test_drawn_draft_tokens_leave_the_distribution_as_it_is() -> None:
    plain, drafted = drawn("none"), drawn("drawing")
    assert len(plain) == len(drafted) > 2
    assert chi2_contingency(np.stack([plain, drafted])).pvalue > 1e-3


def test_a_grammar_that_becomes_too_complex_ends_its_own_request_alone() -> None:
    grammar = Grammar(GrammarKind.REGEX, "(((a{50,100}){50,100}){50,100}){50,100}")
    hostile, other = request(SamplingParams(1.0, seed=1, grammar=grammar)), request(GREEDY)
    served = serve(made(), hostile, other)
    assert served.finish(hostile) is FinishReason.GRAMMAR
    assert served.finish(other) is FinishReason.STOP
    assert re.fullmatch(PATTERN, text(served, other))


def test_a_grammar_that_takes_the_passes_time_ends_its_own_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_SHARE", "_MIN_SECONDS", "_CREDIT_SECONDS"):
        monkeypatch.setattr(f"specops.text.grammar.{name}", 0.0)
    asked, other = request(GREEDY), request(SamplingParams())
    served = serve(made(), asked, other)
    assert served.finish(asked) is FinishReason.GRAMMAR
    assert "of the model's time" in (served.outputs[asked.request_id][-1].error or "")
    assert served.finish(other) is FinishReason.LENGTH


def test_a_stop_string_ends_a_constrained_answer_as_any_other() -> None:
    asked = request(GREEDY, stop=("-",))
    served = serve(made(), asked)
    assert served.finish(asked) is FinishReason.STOP
    assert "-" not in text(served, asked)
