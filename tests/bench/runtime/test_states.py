"""Layers with a state: the ratios go the way that their targets mean."""

from __future__ import annotations

from bench.runtime.states import QUICK, outcome
from bench.tools.quiet import Turns


def test_a_state_may_cost_a_fifth_of_the_tokens_and_a_fading_one_a_fifth_of_the_time() -> None:
    together = Turns(ms={"eight requests": {"Qwen3.5 0.8B": [50.0], "Qwen3 0.6B": [40.0]}})
    slow = {"a prompt that fades": 120.0, "a random prompt": 100.0}
    prompts = Turns(ms={name: {"Qwen3.5 0.8B": [ms]} for name, ms in slow.items()})
    done = outcome(together, prompts, QUICK)
    assert [(line.measured, line.met) for line in done.targets] == [(0.8, True), (1.2, True)]
    together.ms["eight requests"]["Qwen3.5 0.8B"] = [51.0]
    prompts.ms["a prompt that fades"]["Qwen3.5 0.8B"] = [121.0]
    assert not any(line.met for line in outcome(together, prompts, QUICK).targets)
