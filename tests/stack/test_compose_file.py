"""compose.yaml: hardened, capped, pinned, checked, and able to pass every setting on."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from specops.config import PREFIX, Settings
from tests.stack.support import ROOT, run, tool

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SCALE = (ROOT / "compose.scale.yaml").read_text()


class _Loader(yaml.SafeLoader):
    """Knows Compose's word for what an override takes away."""


_Loader.add_constructor("!reset", lambda loader, node: None)
GATEWAY: dict[str, Any] = yaml.load(SCALE, _Loader)["services"]["gateway"]  # noqa: S506
SERVICES = {**SERVICES, "gateway": GATEWAY}
every_service = pytest.mark.parametrize("name", SERVICES)


def compose_command() -> list[str] | None:
    docker = tool("docker")
    if docker and run(docker, "compose", "version").returncode == 0:
        return [docker, "compose"]
    return [path] if (path := tool("docker-compose")) else None


def resolved(tmp_path: Path, dotenv: str = "", *options: str) -> dict[str, Any]:
    """The file as Docker Compose understands it, with the lines of `dotenv` as .env."""
    command = compose_command()
    if command is None:
        pytest.skip("no Docker Compose here")
    env_file = tmp_path / "env"
    env_file.write_text(dotenv)
    result = run(*command, "--env-file", env_file, *options, "--profile", "load", "config")
    assert result.returncode == 0, result.stderr
    config: dict[str, Any] = yaml.safe_load(result.stdout)
    return config


@every_service
def test_a_service_is_hardened(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"].split(":")[0] not in {"0", "root"}
    assert any(mount.startswith("/tmp:") for mount in service["tmpfs"])  # noqa: S108
    assert "privileged" not in service
    assert "cap_add" not in service


@every_service
def test_a_service_has_a_memory_limit_and_a_healthcheck(name: str) -> None:
    service = SERVICES[name]
    assert service["mem_limit"]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert {"interval", "timeout", "retries", "start_period"} <= set(service["healthcheck"])


@every_service
def test_an_image_is_pinned_to_a_full_version(name: str) -> None:
    _, _, version = SERVICES[name]["image"].partition(":")
    assert version.removeprefix("v").count(".") == 2


@every_service
def test_ports_are_published_on_this_machine_alone(name: str) -> None:
    for port in SERVICES[name]["ports"]:
        assert port.startswith(("127.0.0.1:", "${SPECOPS_HOST:-127.0.0.1}:"))


@every_service
def test_dependencies_wait_for_a_condition(name: str) -> None:
    for other, how in SERVICES[name].get("depends_on", {}).items():
        assert other in SERVICES
        assert how["condition"] in {"service_started", "service_healthy"}


def test_every_setting_can_be_passed_on() -> None:
    environment = SERVICES["api"]["environment"]
    names = {PREFIX + item.name.upper() for item in fields(Settings)}
    names |= {"HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"}  # read by huggingface_hub
    assert set(environment) == names
    text = (ROOT / "compose.yaml").read_text()
    assert {name for name in names if f"${{{name}:-" not in text} == set()


def test_locust_starts_on_request_only() -> None:
    assert {name: one.get("profiles") for name, one in COMPOSE["services"].items()} == {
        "api": None,
        "prometheus": None,
        "grafana": None,
        "locust": ["load"],
    }


def test_grafana_opens_on_a_dashboard_without_login() -> None:
    grafana = SERVICES["grafana"]["environment"]
    assert grafana["GF_AUTH_ANONYMOUS_ENABLED"] == "true"
    assert grafana["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    home = Path(grafana["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (ROOT / "grafana" / "dashboards" / home.name).exists()
    provider = yaml.safe_load((ROOT / "grafana/provisioning/dashboards/specops.yml").read_text())[
        "providers"
    ][0]
    assert provider["options"]["path"] == str(home.parent)


def test_every_bind_mount_exists() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).exists(), source


def test_the_api_gets_four_gigabytes_and_twelve_of_swap(tmp_path: Path) -> None:
    assert (SERVICES["api"]["mem_limit"], SERVICES["api"]["memswap_limit"]) == ("4g", "16g")
    api = resolved(tmp_path)["services"]["api"]  # as Compose understands it, where that is here
    assert int(api["mem_limit"]) == 4 << 30
    assert int(api["memswap_limit"]) == 16 << 30  # memory plus swap


def test_settings_in_dotenv_reach_the_service(tmp_path: Path) -> None:
    config = resolved(
        tmp_path,
        "SPECOPS_SLOTS=7\nSPECOPS_PORT=8123\nSPECOPS_CACHE_DIR=/srv/cache\n"
        "GRAFANA_ADMIN_PASSWORD=swordfish\n",
    )
    api = config["services"]["api"]
    assert api["environment"]["SPECOPS_SLOTS"] == "7"
    # Inside the container port and folders stay; outside they are what .env says.
    assert api["environment"]["SPECOPS_PORT"] == "8000"
    assert api["ports"][0]["published"] == "8123"
    assert {"/srv/cache": "/var/cache/specops"}.items() <= {
        mount["source"]: mount["target"] for mount in api["volumes"]
    }.items()
    grafana = config["services"]["grafana"]["environment"]
    assert grafana["GF_SECURITY_ADMIN_PASSWORD"] == "swordfish"  # noqa: S105


def test_running_requests_get_longer_to_end_than_they_take(tmp_path: Path) -> None:
    grace = resolved(tmp_path)["services"]["api"]["stop_grace_period"]
    assert float(grace.removesuffix("s")) > Settings().drain_timeout


SCALED = ("--file", "compose.yaml", "--file", "compose.scale.yaml", "--profile", "scale")


def published(config: dict[str, Any]) -> dict[str, str]:
    """The service at each port of this machine."""
    return {
        port["published"]: name
        for name, service in config["services"].items()
        for port in service.get("ports") or ()
    }


def test_one_replica_needs_no_gateway(tmp_path: Path) -> None:
    config = resolved(tmp_path)
    assert "gateway" not in config["services"]
    assert published(config)["8000"] == "api"


@pytest.mark.parametrize("way", ["options", "dotenv"])
def test_several_have_the_gateway_at_the_same_url(tmp_path: Path, way: str) -> None:
    lines = "SPECOPS_PORT=8123\nREPLICAS=2\n"
    if way == "dotenv":
        lines += "COMPOSE_FILE=compose.yaml:compose.scale.yaml\n"
    config = resolved(tmp_path, lines, *(SCALED if way == "options" else ("--profile", "scale")))
    alone = resolved(tmp_path, "SPECOPS_PORT=8123\n")
    assert published(config) == {**published(alone), "8123": "gateway"}
    assert config["services"]["api"]["scale"] == 2
    assert config["services"]["locust"]["command"][1] == "http://gateway:8000"
    # All else is as with one: the same volume, the same cap each.
    for name in ("volumes", "memswap_limit", "mem_limit", "environment"):
        assert config["services"]["api"][name] == alone["services"]["api"][name]


def test_the_gateway_outlives_the_longest_answer(tmp_path: Path) -> None:
    grace = resolved(tmp_path, "", *SCALED)["services"]["gateway"]["stop_grace_period"]
    minutes, _, seconds = grace.removesuffix("s").rpartition("m")
    assert float(minutes or 0) * 60 + float(seconds) > Settings().request_timeout
