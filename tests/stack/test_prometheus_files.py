"""Prometheus' configuration and rules, held against the real promtool where it is there."""

from __future__ import annotations

import re
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
    found = sum(map(int, re.findall(r"(\d+) rules found", result.stdout)))
    assert found == len(queries.rules())


@pytest.mark.parametrize(
    "path", sorted((ROOT / "prometheus" / "tests").glob("*.yml")), ids=lambda path: path.stem
)
def test_rules_compute_what_their_tests_say(path: Path) -> None:
    result = promtool("test", "rules", str(path))
    assert result.returncode == 0, result.stdout + result.stderr


ALERTS = {rule["alert"]: rule for rule in queries.rules() if "alert" in rule}


def alert_cases() -> dict[str, list[bool]]:
    """For each alert, whether each of its tests expects it to fire."""
    cases: dict[str, list[bool]] = {}
    for path in (ROOT / "prometheus" / "tests").glob("*.yml"):
        for test in yaml.safe_load(path.read_text())["tests"]:
            for case in test.get("alert_rule_test", []):
                cases.setdefault(case["alertname"], []).append(bool(case["exp_alerts"]))
    return cases


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_a_case_that_fires_and_one_that_does_not(name: str) -> None:
    assert set(alert_cases()[name]) == {True, False}


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_says_what_to_do(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in {"page", "ticket"}
    assert rule["annotations"]["summary"].endswith(".")
    assert len(rule["annotations"]["runbook"]) > 40


@pytest.mark.parametrize(
    ("apis", "gateway"),
    [(["127.0.0.1:8123"], None), (["127.0.0.1:8123", "127.0.0.1:8124"], "127.0.0.1:9901")],
)
def test_a_native_run_scrapes_what_there_is_where_it_listens(
    apis: list[str], gateway: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "prometheus.yml"
    path.write_text(native.prometheus_config(apis, gateway))
    config = yaml.safe_load(path.read_text())
    found = {job["job_name"]: job["static_configs"] for job in config["scrape_configs"]}
    assert found == {
        "specops": [{"targets": apis}],
        "gateway": [{"targets": [gateway] if gateway else []}],
    }
    assert config["rule_files"] == [f"{ROOT}/prometheus/rules/*.yml"]
    assert config["global"] == yaml.safe_load(CONFIG.read_text())["global"]
    result = promtool("check", "config", str(path))
    assert result.returncode == 0, result.stdout + result.stderr


def test_in_compose_every_replica_is_found_by_its_name() -> None:
    config = yaml.safe_load(CONFIG.read_text())
    jobs = {job["job_name"]: job["dns_sd_configs"][0] for job in config["scrape_configs"]}
    asked = {name: (job["names"], job["port"]) for name, job in jobs.items()}
    assert asked == {"specops": (["api"], 8000), "gateway": (["gateway"], 9901)}
