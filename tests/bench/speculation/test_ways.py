"""The gain of speculation: every figure of a row follows from the requests' counts, by hand."""

import pytest

from bench.models import BenchModel
from bench.prompts import CREATIVE, GREEDY, Prompt
from bench.speculation import ways
from bench.speculation.ways import PLAIN, Config, Measured, Row, Runner, Sizes
from specops.request import SamplingParams, SourceStats
from tests.bench.speculation.runs import SUFFIX, run

BASES = [run("aa", 2.0), run("bb", 6.0)]
MANY = {"suffix": SourceStats([4, 4, 4], [2, 1, 0]), "head": SourceStats([4], [2])}
FEW = {"suffix": SourceStats([1, 1, 1, 1], [1, 1, 1, 1]), "head": SourceStats([1], [1])}
DRAFTED = [
    run("aa", 1.0, steps=5, drafts=4, draft_misses=1, sources=MANY),
    run("bc", 2.0, steps=5, drafts=1, draft_misses=4, sources=FEW),
]
BOTH = [[Prompt("code", "a")], [Prompt(CREATIVE, "b")]]


def row(config: Config = SUFFIX, sampling: SamplingParams = GREEDY) -> Row:
    drawn = Prompt("code", "a", sampling)
    return Measured([[drawn], BOTH[1]], {PLAIN: BASES, config: DRAFTED}).row(config)


def test_figures_are_sums_over_all_prompts_and_ratios_are_by_batch() -> None:
    found = row()
    assert found.acceptance == pytest.approx(10 / 21)
    assert found.misses == pytest.approx(5 / 10)
    assert found.tokens_per_jump == pytest.approx(20 / 10)
    assert found.mean_acceptance_length == pytest.approx(1 + 10 / 5)
    assert found.tokens_per_second == pytest.approx(20 / 3)
    assert (found.speedup.low, found.speedup.high) == pytest.approx((2.25, 2.75))
    assert found.speedup.median == pytest.approx(2.5)
    assert found.total_speedup == pytest.approx(8 / 3)
    assert found.whole_speedup == pytest.approx((8 + 2) / (3 + 2))
    never = Measured(BOTH, {PLAIN: BASES, SUFFIX: BASES}).row(SUFFIX)
    assert (never.acceptance, never.mean_acceptance_length, never.misses) == (0.0, 0.0, 0.0)


def test_equal_counts_the_outputs_that_could_be_and_are_plain_decodings() -> None:
    assert (row().equal, row().repeatable) == (1, 2)
    for sampling, compared in (
        (SamplingParams(0.8), (0, 1)),
        (SamplingParams(0.8, seed=1), (1, 2)),
    ):
        sampled = row(sampling=sampling)
        assert (sampled.equal, sampled.repeatable) == compared


def test_every_configuration_runs_on_every_prompt_in_every_round(tiny: BenchModel) -> None:
    runner = Runner.load(tiny)
    prompts = [
        Prompt("code", "def add(a, b):\n"),
        Prompt(CREATIVE, "return a + b\n", SamplingParams(temperature=0.8, seed=1)),
    ]
    configs = [Config("draft", 1), Config("draft", 3), Config("suffix", 3, adaptive=True)]
    found = ways.measure(runner, configs, prompts, Sizes(12, rounds=2))
    assert list(found.runs) == [PLAIN, *configs]
    assert found.batches == [[prompt] for prompt in prompts] * 2
    assert all(len(runs) == 4 for runs in found.runs.values())
    answers = {config: [run.answers[0] for run in runs] for config, runs in found.runs.items()}
    assert all(len(answer.tokens) == 12 for told in answers.values() for answer in told)
    drafted = {config: told[0].stats.draft_tokens for config, told in answers.items()}
    assert drafted[PLAIN] == 0
    assert drafted[configs[1]] > drafted[configs[0]] > 0
    assert [(row.equal, row.repeatable) for row in found.rows()] == [(4, 4)] * 4


def test_a_way_learns_from_its_own_requests_alone(tiny: BenchModel) -> None:
    """Each way has a controller of its own, which goes on where it was."""
    runner = Runner.load(tiny)
    scheduler, found = runner.engine.scheduler, []
    for config in (Config("draft", 3), Config("draft", 2), Config("draft", 3)):
        runner.run([Prompt("code", "def add(a, b):\n")], config, 12)
        found.append(scheduler.controller)
    assert found[0] is found[2] is not found[1]


def test_too_few_prompts_or_tokens_are_refused(tiny: BenchModel) -> None:
    runner = Runner.load(tiny)
    with pytest.raises(RuntimeError, match="ask for more new tokens"):
        ways.measure(runner, [], [Prompt("code", "def add(a, b):\n")], Sizes(1))
    with pytest.raises(ValueError, match="0 prompts are too few"):
        ways.measure(runner, [], [], Sizes(4))
