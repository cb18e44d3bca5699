"""compose.yaml and compose.scale.yaml: hardened, limited, pinned, passing every setting on."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from specops.config import PREFIX, Settings
from tests.stack.support import ROOT, compose_command, read_yaml, succeed

yaml.SafeLoader.add_constructor("!reset", lambda loader, node: None)  # Compose's own word
COMPOSE: dict[str, Any] = read_yaml("compose.yaml")
SERVICES: dict[str, dict[str, Any]] = {
    **COMPOSE["services"],
    "gateway": read_yaml("deploy/compose.scale.yaml")["services"]["gateway"],
}
SCALED = ("--file", "compose.yaml", "--file", "deploy/compose.scale.yaml", "--profile", "scale")


def resolved(tmp_path: Path, dotenv: str = "", *options: str) -> dict[str, Any]:
    """The file as Docker Compose understands it, with the lines of `dotenv` as .env."""
    command = compose_command()
    if command is None:
        pytest.skip("no Docker Compose here")
    env_file = tmp_path / "env"
    env_file.write_text(dotenv)
    config: dict[str, Any] = yaml.safe_load(
        succeed(*command, "--env-file", env_file, *options, "--profile", "load", "config")
    )
    return config


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_hardened_limited_pinned_and_checked(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"].split(":")[0] not in {"0", "root"}
    assert any(mount.startswith("/tmp:") for mount in service["tmpfs"])  # noqa: S108
    assert not {"privileged", "cap_add"} & set(service)
    assert service["mem_limit"]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert {"interval", "timeout", "retries", "start_period"} <= set(service["healthcheck"])
    assert service["image"].partition(":")[2].count(".") == 2
    for port in service["ports"]:
        assert port.startswith(("127.0.0.1:", "${SPECOPS_HOST:-127.0.0.1}:"))
    for source in (volume.split(":")[0] for volume in service.get("volumes", [])):
        assert (ROOT / source).exists() or not source.startswith("./"), source


def test_every_setting_can_be_passed_on() -> None:
    names = {PREFIX + item.name.upper() for item in fields(Settings)}
    names |= {"HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"}  # huggingface_hub reads these
    names |= {"CODESPACE_NAME", "GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN"}  # a Codespace sets them
    names |= {name for name in SERVICES["api"]["environment"] if name.startswith("OTEL_")}
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in names
    assert set(SERVICES["api"]["environment"]) == names
    text = (ROOT / "compose.yaml").read_text()
    assert {name for name in names if f"${{{name}:-" not in text} == set()


def test_traces_go_where_documentation_says_and_exemplars_lead_there(tmp_path: Path) -> None:
    """Jaeger listens at the documented address; a viewer of Grafana reaches its page."""
    jaeger = read_yaml("deploy/jaeger.yaml")
    assert jaeger["receivers"]["otlp"]["protocols"]["http"]["endpoint"].endswith(":4318")
    page = int(jaeger["extensions"]["jaeger_query"]["http"]["endpoint"].rpartition(":")[2])
    assert SERVICES["jaeger"]["ports"] == [f"127.0.0.1:${{JAEGER_PORT:-{page}}}:{page}"]
    assert "--enable-feature=exemplar-storage" in SERVICES["prometheus"]["command"]
    for file in ("compose.yaml", "docs/dashboards.md"):
        assert "OTEL_EXPORTER_OTLP_ENDPOINT=http://jaeger:4318" in (ROOT / file).read_text()
    (metrics,) = read_yaml("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    (link,) = metrics["jsonData"]["exemplarTraceIdDestinations"]
    # No data source: its link would lead to Explore, which an anonymous Viewer does not have.
    assert (link["name"], link.get("datasourceUid")) == ("trace_id", None)
    assert link["url"] == "$JAEGER_PAGE/trace/$${__value.raw}"
    for dotenv, reached in (
        ("", f"http://127.0.0.1:{page}"),
        ("JAEGER_PORT=16999\n", "http://127.0.0.1:16999"),
        ("CODESPACE_NAME=blue-fish\n", f"https://blue-fish-{page}.app.github.dev"),
    ):
        grafana = resolved(tmp_path, dotenv)["services"]["grafana"]["environment"]
        assert grafana["JAEGER_PAGE"] == reached


@pytest.mark.parametrize("file", ["compose.yaml", "deploy/compose.scale.yaml"])
def test_every_variable_has_a_default(file: str) -> None:
    """Compose warns of others. Up to 2.26 also inside of an alternative that it does not take."""
    assert re.findall(r"(?<!\$)\$(?:\w+|\{\w+\})", (ROOT / file).read_text()) == []


def test_settings_limits_and_grace_periods_as_compose_understands_them(tmp_path: Path) -> None:
    dotenv = "SPECOPS_SLOTS=7\nSPECOPS_PORT=8123\nSPECOPS_CACHE_DIR=/srv/cache\n"
    services = resolved(tmp_path, f"{dotenv}GRAFANA_ADMIN_PASSWORD=swordfish\n")["services"]
    api = services["api"]
    assert api["environment"]["SPECOPS_SLOTS"] == "7"
    # Inside the container the port and the folders stay; outside they are what .env says.
    assert api["environment"]["SPECOPS_PORT"] == "8000"
    assert api["ports"][0]["published"] == "8123"
    mounts = {mount["source"]: mount["target"] for mount in api["volumes"]}
    assert mounts["/srv/cache"] == "/var/cache/specops"
    password = services["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"]
    assert password == "swordfish"  # noqa: S105
    assert int(api["mem_limit"]) == 4 << 30
    assert int(api["memswap_limit"]) == 16 << 30  # memory plus swap
    # Running requests get more time to end than they take.
    assert float(api["stop_grace_period"].removesuffix("s")) > Settings().drain_timeout


def published(config: dict[str, Any]) -> dict[str, str]:
    """The service behind each port of this machine."""
    return {
        port["published"]: name
        for name, service in config["services"].items()
        for port in service.get("ports") or ()
    }


@pytest.mark.parametrize("way", ["options", "dotenv"])
def test_several_replicas_have_the_gateway_at_the_url_of_one(tmp_path: Path, way: str) -> None:
    lines = "SPECOPS_PORT=8123\nREPLICAS=2\n"
    if way == "dotenv":
        lines += "COMPOSE_FILE=compose.yaml:deploy/compose.scale.yaml\n"
    config = resolved(tmp_path, lines, *(SCALED if way == "options" else ("--profile", "scale")))
    alone = resolved(tmp_path, "SPECOPS_PORT=8123\n")
    assert "gateway" not in alone["services"]
    for service in config["services"].values():  # paths are those of the first file's folder
        mounts = [one["source"] for one in service.get("volumes", ()) if one["type"] == "bind"]
        folders = [service["build"]["context"]] if "build" in service else []
        assert [path for path in (*mounts, *folders) if not Path(path).exists()] == []
    assert published(alone)["8123"] == "api"
    assert published(config) == {**published(alone), "8123": "gateway"}
    assert config["services"]["api"]["scale"] == 2
    assert config["services"]["locust"]["command"][1] == "http://gateway:8000"
    for name in ("volumes", "memswap_limit", "mem_limit", "environment"):
        assert config["services"]["api"][name] == alone["services"]["api"][name]
    scraped = {
        mount["target"]: Path(mount["source"]).name
        for mount in config["services"]["prometheus"]["volumes"]
    }
    assert scraped["/etc/prometheus/prometheus.yml"] == "scale.yml"
    # The gateway outlives the longest answer.
    grace = config["services"]["gateway"]["stop_grace_period"]
    minutes, _, seconds = grace.removesuffix("s").rpartition("m")
    assert float(minutes or 0) * 60 + float(seconds) > Settings().request_timeout
