"""The gain of speculation: every figure of a row follows from the requests' counts, by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from bench.models import BenchModel
from bench.prompts import CREATIVE, Prompt
from bench.speculation import ways
from bench.speculation.chat import sources_table
from bench.speculation.ways import PLAIN, Config, Measured, Row, Runner, Sizes
from specops.config import Settings
from specops.request import SamplingParams, SourceStats
from tests.bench.speculation.runs import ADAPTIVE, SUFFIX, run

BASES = [run("aa", 2.0), run("bb", 6.0)]
DRAFTED = [
    run(
        "aa",
        1.0,
        steps=5,
        drafts=4,
        draft_misses=1,
        sources={"suffix": SourceStats((4, 4, 4), (2, 1, 0)), "head": SourceStats((4,), (2,))},
    ),
    run(
        "bc",
        2.0,
        steps=5,
        drafts=1,
        draft_misses=4,
        sources={
            "suffix": SourceStats((1, 1, 1, 1), (1, 1, 1, 1)),
            "head": SourceStats((1,), (1,)),
        },
    ),
]
BOTH = [[Prompt("code", "a")], [Prompt(CREATIVE, "b")]]


def row(config: Config = SUFFIX, temperature: float = 0.0) -> Row:
    drawn = Prompt("code", "a", SamplingParams(temperature=temperature))
    return Measured([[drawn], BOTH[1]], {PLAIN: BASES, config: DRAFTED}).row(config)


def test_acceptance_jumps_and_misses_are_sums_over_all_prompts() -> None:
    found = row()
    assert found.acceptance == pytest.approx(10 / 21)
    assert found.misses == pytest.approx(5 / 10)
    assert found.tokens_per_jump == pytest.approx(20 / 10)
    assert found.mean_acceptance_length == pytest.approx(1 + 10 / 5)
    assert found.tokens_per_second == pytest.approx(20 / 3)


def test_sources_are_told_apart_position_by_position() -> None:
    found = row()
    assert found.sources == {
        "suffix": SourceStats((5, 5, 5, 1), (3, 2, 1, 1)),
        "head": SourceStats((5,), (3,)),
    }
    table = sources_table(found)
    assert table.columns == ("source", "draft tokens", "1", "2", "3", "4")
    assert table.rows == [
        ("suffix", "16", "60%", "40%", "20%", "100%"),
        ("head", "5", "60%", "", "", ""),
    ]


def test_speedup_is_plain_time_over_this_per_batch_and_of_the_sums() -> None:
    found = row()
    assert (found.speedup.low, found.speedup.high) == pytest.approx((2.25, 2.75))
    assert found.speedup.median == pytest.approx(2.5)
    assert found.total_speedup == pytest.approx(8 / 3)
    assert found.whole_speedup == pytest.approx((8 + 2) / (3 + 2))


def test_equal_counts_the_greedy_prompts_with_plain_decodings_output() -> None:
    assert (row().equal, row().greedy) == (1, 2)
    sampled = row(temperature=0.8)
    assert (sampled.equal, sampled.greedy) == (0, 1)


def test_a_drafter_that_never_drafted_has_no_acceptance() -> None:
    found = Measured(BOTH, {PLAIN: BASES, SUFFIX: BASES}).row(SUFFIX)
    assert (found.acceptance, found.mean_acceptance_length, found.misses) == (0.0, 0.0, 0.0)


def test_cells_stand_below_their_columns_whatever_the_way() -> None:
    for config in (PLAIN, SUFFIX, ADAPTIVE):
        assert len(row(config).cells) == len(ways.COLUMNS)


def test_labels_tell_configurations_apart() -> None:
    configs = (PLAIN, SUFFIX, ADAPTIVE, Config("suffix", 8))
    assert len({config.label for config in configs}) == 4


def test_a_category_has_its_own_prompts_and_runs() -> None:
    both = Measured(BOTH, {PLAIN: BASES, SUFFIX: DRAFTED})
    assert both.categories == ["code", CREATIVE]
    part = both.of(CREATIVE)
    assert part.batches == BOTH[1:]
    assert part.runs == {PLAIN: BASES[1:], SUFFIX: DRAFTED[1:]}
    result = json.loads(json.dumps([asdict(item) for item in part.rows()]))
    assert [item["k"] for item in result] == [0, 4]
    assert [list(item["sources"]) for item in result] == [[], ["suffix", "head"]]


def test_every_configuration_runs_on_every_prompt_in_every_round(tiny_settings: Settings) -> None:
    runner = Runner.load(BenchModel("tiny", "tiny", tiny_settings))
    prompts = [
        Prompt("code", "def add(a, b):\n"),
        Prompt(CREATIVE, "return a + b\n", SamplingParams(temperature=0.8, seed=1)),
    ]
    configs = [Config("draft", 1), Config("draft", 3), Config("suffix", 3, adaptive=True)]
    found = ways.measure(runner, configs, prompts, Sizes(12, rounds=2), lambda text: None)
    assert list(found.runs) == [PLAIN, *configs]
    assert found.batches == [[prompt] for prompt in prompts] * 2
    assert all(len(runs) == 4 for runs in found.runs.values())
    answers = {config: [run.answers[0] for run in runs] for config, runs in found.runs.items()}
    assert all(len(answer.tokens) == 12 for told in answers.values() for answer in told)
    drafted = {config: told[0].stats.draft_tokens for config, told in answers.items()}
    assert drafted[PLAIN] == 0
    assert drafted[configs[1]] > drafted[configs[0]] > 0
    assert [row.greedy for row in found.rows()] == [2] * 4


def test_a_way_learns_from_its_own_requests_alone(tiny_settings: Settings) -> None:
    """Each way has a controller of its own, which goes on where it was."""
    runner = Runner.load(BenchModel("tiny", "tiny", tiny_settings))
    scheduler, found = runner.engine.scheduler, []
    for config in (Config("draft", 3), Config("draft", 2), Config("draft", 3)):
        runner.run([Prompt("code", "def add(a, b):\n")], config, 12)
        found.append(scheduler.controller)
    assert found[0] is found[2] is not found[1]


def test_passes_in_which_all_decode_are_what_is_timed(
    tiny_settings: Settings,
) -> None:
    runner = Runner.load(BenchModel("tiny", "tiny", replace(tiny_settings, slots=2)))
    prompts = [Prompt("code", "def add(a, b):\n"), Prompt("code", "return a + b\n")]
    found = runner.run(prompts, PLAIN, 24, at_once=2)
    assert 0 < found.decode_seconds < found.seconds
    assert 40 <= found.tokens <= 46  # both came in one pass, or the second one later
    assert found.tokens == found.steps
    with pytest.raises(RuntimeError, match="ask for more new tokens"):
        ways.measure(runner, [], prompts[:1], Sizes(1), lambda text: None)


def test_too_few_prompts_for_a_batch_are_refused(tiny_settings: Settings) -> None:
    runner = Runner.load(BenchModel("tiny", "tiny", tiny_settings))
    with pytest.raises(ValueError, match="0 prompts are too few"):
        ways.measure(runner, [], [], Sizes(4), lambda text: None)
