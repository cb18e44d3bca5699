"""The gain of speculation: every figure of a row follows from the requests' counts, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import speculation
from bench.models import BenchModel
from bench.speculation import PLAIN, Config, Plan, Run, Runs
from specops.config import Settings
from specops.request import GenerationStats

MODEL = BenchModel("made-up", "Made-up model", Settings(), large=False)
NGRAM = Config("ngram", 4)


def run(tokens: str, seconds: float, steps: int = 10, **counts: int) -> Run:
    """Eleven tokens, ten of them decoded."""
    stats = GenerationStats(
        generated_tokens=11,
        sequence_steps=steps,
        prefill_seconds=1.0,
        decode_seconds=seconds,
        **counts,  # type: ignore[arg-type]  # the integer ones
    )
    return Run(tuple(map(ord, tokens)), stats)


def plain() -> Runs:
    return Runs(default=[run("aa", 2.0), run("bb", 6.0)], exact=[run("aa", 2.0)])


def drafted(exact: str = "aa") -> Runs:
    first = run("aa", 1.0, steps=5, drafts=4, draft_misses=1, draft_tokens=16, accepted_tokens=5)
    second = run("bc", 2.0, steps=5, drafts=1, draft_misses=4, draft_tokens=4, accepted_tokens=5)
    return Runs(default=[first, second], exact=[run(exact, 1.0)])


def row(runs: Runs) -> speculation.Row:
    return speculation.Row.of(NGRAM, runs, plain())


def test_acceptance_jumps_and_misses_are_sums_over_all_prompts() -> None:
    found = row(drafted())
    assert found.acceptance == pytest.approx(10 / 20)
    assert found.misses == pytest.approx(5 / 10)
    assert found.tokens_per_jump == pytest.approx(20 / 10)
    assert found.mean_acceptance_length == pytest.approx(1 + 10 / 5)
    assert found.tokens_per_second == pytest.approx(20 / 3)


def test_speedup_is_plain_time_over_this_per_prompt_and_of_the_sums() -> None:
    found = row(drafted())
    assert (found.speedup.low, found.speedup.high) == pytest.approx((2.25, 2.75))
    assert found.speedup.median == pytest.approx(2.5)
    assert found.total_speedup == pytest.approx(8 / 3)
    assert found.request_speedup == pytest.approx(10 / 5)


def test_equal_counts_the_prompts_with_plain_decodings_output() -> None:
    found = row(drafted())
    assert found.equal == 1
    assert found.exact_equal == 1


def test_a_drafter_that_never_guessed_has_no_acceptance() -> None:
    found = row(Runs(default=[run("aa", 2.0), run("bb", 6.0)], exact=[run("aa", 1.0)]))
    assert (found.acceptance, found.mean_acceptance_length, found.misses) == (0.0, 0.0, 0.0)


def test_one_differing_token_in_exact_mode_is_not_lossless() -> None:
    assert speculation.lossless({PLAIN: plain(), NGRAM: drafted()})
    assert speculation.lossless({PLAIN: plain(), NGRAM: drafted(exact="ab")}) is False


def test_without_exact_runs_nothing_is_said_about_losslessness() -> None:
    measured = {PLAIN: Runs(default=plain().default), NGRAM: Runs(default=drafted().default)}
    assert speculation.lossless(measured) is None
    assert speculation.table(MODEL, measured, Plan(2, 1, 11)).rows[1][-1] == ""


def test_table_and_result_show_every_configuration() -> None:
    measured, plan = {PLAIN: plain(), NGRAM: drafted()}, Plan(2, 1, 11)
    rows = speculation.table(MODEL, measured, plan).rows
    assert [line[:3] for line in rows] == [("plain", "", ""), ("ngram", "4", "50.0%")]
    assert rows[1][-2:] == ("1/2", "1/1")
    result = speculation.result(MODEL, measured, plan)
    assert [item["k"] for item in result["configs"]] == [0, 4]
    assert json.loads(json.dumps(result)) == result


def test_prompts_are_read_from_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\\n", "id": 1}\n\n{"prompt": "b"}\n')
    assert speculation.read_prompts(file) == ["a\n", "b"]


def test_every_drafter_and_length_runs_on_every_prompt(tiny_settings: Settings) -> None:
    model = BenchModel("tiny", "tiny", tiny_settings, large=False)
    plan = Plan(prompts=2, exact_prompts=1, new_tokens=12, draft_lengths=(1, 3))
    prompts = ["def add(a, b):\n", "return a + b\n", "not measured\n"]
    measured = speculation.measure(model, plan, lambda text: None, prompts)
    drafters = [config.drafter for config in measured]
    assert drafters == ["none", *(name for name in ("draft", "ngram", "cascade") for _ in (1, 3))]
    assert all(len(runs.default) == 2 for runs in measured.values())
    assert speculation.lossless(measured) is not False  # None where a processor has no exact mode
    guessed = {config: runs.default[0].stats.draft_tokens for config, runs in measured.items()}
    assert guessed[PLAIN] == 0
    assert guessed[Config("draft", 3)] > guessed[Config("draft", 1)] > 0
