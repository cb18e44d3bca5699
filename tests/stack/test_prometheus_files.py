"""Prometheus' configuration and rules, held against the real promtool where it is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from scripts import native
from tests.stack import queries
from tests.stack.support import ROOT, Finished, run, tool

CONFIG = ROOT / "prometheus" / "prometheus.yml"


def promtool(*arguments: str) -> Finished:
    binary = tool("promtool")
    if binary is None:
        pytest.skip("no promtool here")
    return run(binary, *arguments)


def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    result = promtool("check", "config", str(CONFIG))
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(queries.rules())} rules found" in result.stdout


@pytest.mark.parametrize(
    "path", sorted((ROOT / "prometheus" / "tests").glob("*.yml")), ids=lambda path: path.stem
)
def test_rules_compute_what_their_tests_say(path: Path) -> None:
    result = promtool("test", "rules", str(path))
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_native_run_scrapes_the_api_where_it_listens(tmp_path: Path) -> None:
    path = tmp_path / "prometheus.yml"
    path.write_text(native.prometheus_config("127.0.0.1:8123"))
    config = yaml.safe_load(path.read_text())
    assert config["scrape_configs"][0]["static_configs"] == [{"targets": ["127.0.0.1:8123"]}]
    assert config["rule_files"] == [f"{ROOT}/prometheus/rules/*.yml"]
    assert config["global"] == yaml.safe_load(CONFIG.read_text())["global"]
    result = promtool("check", "config", str(path))
    assert result.returncode == 0, result.stdout + result.stderr
