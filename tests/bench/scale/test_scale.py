"""Tables say what was measured, and nothing is extrapolated from what disagrees with it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench.models import configured
from bench.scale import simulated
from bench.scale.clients import Cost
from bench.scale.envoy import Maglev
from bench.scale.fleet import cores
from bench.scale.model import Simulation
from bench.scale.scale import QUICK, Measured, Run, outcome
from bench.scale.traffic import talks
from bench.tools.report import Summary
from specops.config import ConfigError
from specops.text.tokenizer import Tokenizer

ONE = Run(["127.0.0.1:1"], 10.0, [60], 100.0, 0.8, 0.1, 0.2, 0, 0.01)
TWO = replace(ONE, addresses=["127.0.0.1:1", "127.0.0.1:2"], requests=[40, 20], cached=0.76)


def costs(added: float) -> dict[str, Cost]:
    summary = Summary(added, added, added, 10)
    return {"/tokenize": Cost(summary, summary, summary, 1e-4)}


def reached(measured: Measured) -> list[bool]:
    return [line.met for line in outcome("m", measured).wanted]


def test_what_was_wanted_is_held_against_what_was_measured() -> None:
    assert reached(Measured(QUICK, True, [ONE, TWO], TWO, costs(0.0005))) == [True] * 7
    uneven = replace(TWO, requests=[50, 10], cached=0.7)
    busy, slow = replace(ONE, gateway=0.06), replace(uneven, gateway=0.06)
    assert reached(Measured(QUICK, True, [busy, uneven], slow, costs(0.0015))) == [False] * 7


def test_the_tables_say_it() -> None:
    slow = replace(TWO, seconds=60.0)
    tables = outcome("a model", Measured(QUICK, True, [ONE, TWO], slow, costs(0.0005))).tables
    (one, two, last) = tables[0].rows
    assert one[6:8] == ("1.000", "1.00")
    assert two[6:8] == last[6:8] == ("0.950", "1.33")
    assert last[1] == "60"
    assert tables[1].rows[0][3].startswith("0.50 ")


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


def documents(folder: Path, **changed: float) -> Path:
    """Results of `scale` as the simulation finds them, but for what is changed."""
    model = configured()
    encode = Tokenizer.load(model.folder().path).encode
    plan = talks(QUICK.clients, QUICK.rounds)
    told = Simulation(Maglev(TWO.addresses), plan, lambda text: len(encode(text))).told()
    found = replace(TWO, requests=told.requests, cached=told.cached, at_home=told.at_home)
    run = replace(found, **changed)
    measured = Measured(QUICK, True, [run], run, {})
    (folder / "scale.json").write_text(json.dumps(asdict(measured)))
    return folder


def test_what_agrees_is_extrapolated(tmp_path: Path) -> None:
    found = simulated.run(configured(), documents(tmp_path), simulated.Plan((4,), 1))
    assert found.sound
    assert [row[-1] for row in found.tables[0].rows] == ["yes"]
    assert len(found.tables[1].rows) == 2


def test_what_disagrees_is_not(tmp_path: Path) -> None:
    folder = documents(tmp_path, cached=0.5)
    found = simulated.run(configured(), folder, simulated.Plan((4,), 1))
    assert not found.sound
    (check,) = found.tables
    assert [row[-1] for row in check.rows] == ["NO"]


def test_without_a_measurement_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="measure first"):
        simulated.run(configured(), tmp_path, simulated.QUICK)
