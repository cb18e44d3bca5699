"""Tables say what was measured, and targets are judged by it."""

import os
from dataclasses import replace

import pytest

from bench.scale.clients import Cost
from bench.scale.fleet import cores
from bench.scale.scale import QUICK, Measured, Run, outcome
from bench.tools.report import Summary

ONE = Run(10.0, [60], 100.0, 0.8, 0.1, 0.2, 0, 0.01)
TWO = replace(ONE, requests=[40, 20], cached=0.76)


def costs(added: float) -> dict[str, Cost]:
    summary = Summary(added, added, added, 10)
    return {"/tokenize": Cost(summary, summary, summary, 1e-4)}


def reached(measured: Measured) -> list[bool]:
    return [line.met for line in outcome("m", measured).targets]


def test_what_was_wanted_is_held_against_what_was_measured() -> None:
    assert reached(Measured(QUICK, True, [ONE, TWO], TWO, costs(0.0005))) == [True] * 7
    uneven = replace(TWO, requests=[50, 10], cached=0.7)
    busy, slow = replace(ONE, gateway=0.06), replace(uneven, gateway=0.06)
    assert reached(Measured(QUICK, True, [busy, uneven], slow, costs(0.0015))) == [False] * 7


def test_replicas_have_equal_parts_or_one_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    found = cores(3)
    assert found.shared
    assert found.replicas == (frozenset({1}),) * 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    found = cores(3)
    assert not found.shared
    assert found.replicas == (frozenset({1, 2}), frozenset({3, 4}), frozenset({5, 6}))
    assert found.clients == frozenset({0})
