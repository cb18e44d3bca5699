"""Prometheus' configuration and rules, checked by the real promtool."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from scripts import native
from specops.config import Settings
from tests.stack import queries
from tests.stack.support import ROOT, promtool, read_yaml

CONFIG = ROOT / "prometheus" / "prometheus.yml"
SCALE = ROOT / "prometheus" / "scale.yml"
RULE_TESTS = sorted((ROOT / "prometheus" / "tests").glob("*.yml"))


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """The file with the key of the metrics, which a configuration names."""
    file = tmp_path / "metrics-key"
    file.touch()
    return file


@pytest.mark.parametrize("file", [CONFIG, SCALE], ids=lambda file: file.stem)
def test_promtool_accepts_the_configuration_and_the_rules(
    file: Path, tmp_path: Path, key: Path
) -> None:
    config = tmp_path / "prometheus.yml"
    text = file.read_text().replace("/tmp/metrics-key", str(key))  # noqa: S108
    config.write_text(text.replace("rules/", f"{CONFIG.parent}/rules/"))
    found = re.findall(r"(\d+) rules found", promtool("check", "config", config))
    assert sum(map(int, found)) == len(queries.rules())


@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.stem)
def test_rules_compute_what_their_tests_say(path: Path) -> None:
    promtool("test", "rules", path)


def test_every_alert_says_what_to_do_and_has_a_case_that_fires_and_one_that_does_not() -> None:
    cases: dict[str, set[bool]] = {}
    for path in RULE_TESTS:
        for test in yaml.safe_load(path.read_text())["tests"]:
            for case in test["promql_expr_test"]:
                for name in re.findall(r'^ALERTS.alertname="(\w+)", alertstate="f', case["expr"]):
                    cases.setdefault(name, set()).add(bool(case["exp_samples"]))
    for rule in queries.rules():
        if "alert" in rule:
            assert cases[rule["alert"]] == {True, False}, rule["alert"]
            assert rule["labels"]["severity"] in {"page", "ticket"}
            assert rule["annotations"]["summary"].endswith(".")
            assert len(rule["annotations"]["runbook"]) > 40


def test_every_runbook_names_only_dashboards_panels_and_alerts_that_exist() -> None:
    boards = queries.boards().values()
    known = {board["title"].partition(": ")[2] for board in boards}
    known |= {panel["title"] for board in boards for panel in queries.panels_of(board)}
    alerts = {
        rule["alert"]: rule["annotations"]["runbook"] for rule in queries.rules() if "alert" in rule
    }
    for name, runbook in alerts.items():
        assert set(re.findall(r'"([^"]+)"', runbook)) <= known, name
        assert set(re.findall(r"\b(?:see|for) ([A-Z]\w+[A-Z]\w+)", runbook)) <= set(alerts), name
        settings = set(re.findall(r"SPECOPS_[A-Z_]+", runbook))
        assert settings <= {f"SPECOPS_{field.name.upper()}" for field in fields(Settings)}, name
    page = (ROOT / "docs" / "dashboards.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)) == set(alerts)


def test_the_documented_line_attaches_an_alertmanager(tmp_path: Path, key: Path) -> None:
    text = (ROOT / "docs" / "dashboards.md").read_text()
    (line,) = re.findall(r"^alerting: .*$", text, flags=re.MULTILINE)
    assert all(f"\n# {line}\n" in file.read_text() for file in (CONFIG, SCALE))
    config = tmp_path / "prometheus.yml"
    attached = yaml.safe_load(line)
    plain = yaml.safe_load(native.prometheus_config(["127.0.0.1:8123"], None, key))
    config.write_text(yaml.safe_dump(plain | attached))
    assert attached["alerting"]["alertmanagers"] == [
        {"static_configs": [{"targets": ["alertmanager:9093"]}]}
    ]
    promtool("check", "config", config)


def named(name: str, address: str) -> dict[str, object]:
    """A target with the name that its series keep."""
    return {"targets": [address], "labels": {"instance": name}}


@pytest.mark.parametrize(
    ("apis", "gateway", "jobs"),
    [
        (["127.0.0.1:8123"], None, {"specops": [named("api", "127.0.0.1:8123")]}),
        (
            ["127.0.0.1:8123", "127.0.0.1:8124"],
            "127.0.0.1:9901",
            {
                "specops": [named("api-1", "127.0.0.1:8123"), named("api-2", "127.0.0.1:8124")],
                "gateway": [named("gateway", "127.0.0.1:9901")],
            },
        ),
    ],
)
def test_a_native_run_scrapes_the_addresses_of_its_parts_under_names_that_stay(
    apis: list[str], gateway: str | None, jobs: dict[str, object], tmp_path: Path, key: Path
) -> None:
    path = tmp_path / "prometheus.yml"
    path.write_text(native.prometheus_config(apis, gateway, key))
    config = yaml.safe_load(path.read_text())
    found = {job["job_name"]: job["static_configs"] for job in config["scrape_configs"]}
    assert found == jobs
    assert config["scrape_configs"][0]["authorization"] == {"credentials_file": str(key)}
    assert config["rule_files"] == [f"{ROOT}/prometheus/rules/*.yml"]
    assert config["global"] == yaml.safe_load(CONFIG.read_text())["global"]
    promtool("check", "config", path)


def test_compose_names_one_api_by_a_name_that_stays_and_finds_every_replica() -> None:
    one, several = (read_yaml(f"prometheus/{file.name}") for file in (CONFIG, SCALE))
    (api,), (replicas, gateway) = one.pop("scrape_configs"), several.pop("scrape_configs")
    assert one == several
    assert api.pop("static_configs") == [named("api", "api:8000")]
    (found,) = replicas.pop("dns_sd_configs")
    assert (found["names"], found["port"]) == (["api"], 8000)
    assert api == replicas
    assert gateway["static_configs"] == [named("gateway", "gateway:9901")]
