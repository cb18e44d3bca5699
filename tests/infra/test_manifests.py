"""The manifests are valid, agree with each other and promise what the service keeps."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from specops.config import PREFIX, Settings
from specops.http.app import create_app
from specops.metrics.metrics import Metrics
from tests.infra.manifests import (
    INFRA,
    KUSTOMIZED,
    container,
    documents,
    one,
    plain,
    pod,
    rendered,
)
from tests.stack.support import ROOT, run

OLDEST = "1.30"  # preStop's sleep
CUSTOM = {("keda.sh/v1alpha1", "ScaledObject"), ("monitoring.coreos.com/v1", "PodMonitor")}
SELECTOR = {"app.kubernetes.io/name": "specops", "app.kubernetes.io/component": "api"}
every_overlay = pytest.mark.parametrize(
    "name", [str(folder.relative_to(INFRA)) for folder in KUSTOMIZED]
)


def validate(manifest: dict[str, Any]) -> None:
    """Hold a manifest against the schemas of the oldest and the newest version, strictly."""
    if (manifest["apiVersion"], manifest["kind"]) in CUSTOM:
        return  # their schemas are the operators' own
    for version in (OLDEST, kubernetes_validate.latest_version()):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_plain_file_is_valid() -> None:
    for manifest in plain():
        validate(manifest)


def test_a_mistake_would_be_found() -> None:
    broken = one(plain(), "Deployment")
    broken["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(broken)


@every_overlay
def test_what_kustomize_renders_is_valid(name: str) -> None:
    manifests = rendered(name)
    assert manifests
    for manifest in manifests:
        validate(manifest)


def test_the_plain_file_is_the_base() -> None:
    names = yaml.safe_load((INFRA / "base" / "kustomization.yaml").read_text())["resources"]
    assert plain() == [
        manifest for name in names for manifest in documents((INFRA / "base" / name).read_text())
    ]


@every_overlay
def test_everything_selects_the_same_pods(name: str) -> None:
    manifests = rendered(name)
    deployment = one(manifests, "Deployment")
    assert deployment["spec"]["selector"]["matchLabels"] == SELECTOR
    assert deployment["spec"]["template"]["metadata"]["labels"] == SELECTOR
    assert one(manifests, "Service")["spec"]["selector"] == SELECTOR
    assert one(manifests, "Service", "specops-replicas")["spec"]["selector"] == SELECTOR
    assert one(manifests, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == SELECTOR
    assert one(manifests, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == SELECTOR


def test_probes_ask_what_the_service_answers() -> None:
    paths = {getattr(route, "path", None) for route in create_app(Settings()).routes}
    probes = {
        name: container(plain())[f"{name}Probe"]["httpGet"]["path"]
        for name in ("startup", "readiness", "liveness")
    }
    assert probes == {
        "startup": "/health",
        "readiness": "/health",
        "liveness": "/health/live",
    }
    described = create_app(Settings()).openapi()["paths"]
    assert set(probes.values()) <= paths | set(described)


def test_a_first_start_may_download_for_half_an_hour() -> None:
    probe = container(plain())["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800


def test_the_grace_period_is_longer_than_the_longest_answer() -> None:
    settings = service_settings()
    pause = container(plain())["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert settings.drain_timeout >= settings.request_timeout
    assert pod(plain())["terminationGracePeriodSeconds"] > settings.drain_timeout + pause


def service_settings() -> Settings:
    """The settings that the container's environment makes."""
    environment = {item["name"]: item["value"] for item in container(plain())["env"]}
    return Settings.from_env(environment)


def test_no_service_of_the_cluster_reaches_the_settings() -> None:
    # `specops` as a Service's name becomes SPECOPS_PORT in every pod that has service links.
    assert one(plain(), "Service")["metadata"]["name"].upper() + "_" == PREFIX
    assert pod(plain())["enableServiceLinks"] is False


def test_it_gets_two_cpus_and_as_much_memory_as_in_compose() -> None:
    resources = container(plain())["resources"]
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["api"]
    assert resources["limits"]["cpu"] == resources["requests"]["cpu"] == "2"
    assert resources["limits"]["memory"] == resources["requests"]["memory"] == "4Gi"
    assert compose["mem_limit"] == "4g"


@every_overlay
def test_the_container_has_no_privileges(name: str) -> None:
    manifests = rendered(name)
    whole, own = pod(manifests)["securityContext"], container(manifests)["securityContext"]
    (user,) = re.findall(r"^USER (\d+):(\d+)$", (ROOT / "api/Dockerfile").read_text(), re.MULTILINE)
    assert (str(whole["runAsUser"]), str(whole["runAsGroup"])) == user
    assert whole["runAsNonRoot"] is True
    assert whole["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own["readOnlyRootFilesystem"] is True
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert pod(manifests)["automountServiceAccountToken"] is False


@every_overlay
def test_what_it_writes_to_is_mounted(name: str) -> None:
    manifests = rendered(name)
    mounts = {item["mountPath"]: item["name"] for item in container(manifests)["volumeMounts"]}
    assert set(mounts) == {"/var/cache/specops", "/tmp"}  # noqa: S108
    assert set(mounts.values()) == {item["name"] for item in pod(manifests)["volumes"]}


def test_the_image_is_the_one_that_compose_builds() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["api"]
    assert container(plain())["image"] == compose["image"]


def test_the_base_scales_at_70_percent_of_the_cpu() -> None:
    (metric,) = one(plain(), "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["resource"] == {
        "name": "cpu",
        "target": {"type": "Utilization", "averageUtilization": 70},
    }


def test_the_queue_overlay_scales_on_requests_and_on_nothing_else() -> None:
    manifests = rendered("overlays/queue")
    assert not [item for item in manifests if item["kind"] == "HorizontalPodAutoscaler"]
    scaled = one(manifests, "ScaledObject")["spec"]
    assert scaled["scaleTargetRef"] == {"name": "specops"}
    (trigger,) = scaled["triggers"]
    names = re.findall(r"specops_\w+", trigger["metadata"]["query"])
    assert "specops_requests_waiting" in names
    exported = {family.name for family in Metrics().registry.collect()}
    assert set(names) <= exported


def test_the_monitor_reads_the_port_that_is_named_and_its_job_is_the_dashboards() -> None:
    manifests = rendered("overlays/monitoring")
    monitor = one(manifests, "PodMonitor")["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in container(manifests)["ports"]}
    assert monitor["selector"]["matchLabels"] == SELECTOR
    scraped = yaml.safe_load((ROOT / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    labels = one(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert labels[monitor["jobLabel"]] == scraped[0]["job_name"]


def test_the_network_policy_lets_the_api_be_asked() -> None:
    manifests = plain()
    (rule,) = one(manifests, "NetworkPolicy")["spec"]["ingress"]
    (port,) = container(manifests)["ports"]
    assert [item["port"] for item in rule["ports"]] == [port["containerPort"]]


def test_every_dashboard_becomes_a_config_map_that_the_sidecar_finds() -> None:
    printed = run(sys.executable, INFRA / "dashboards.py")
    assert printed.returncode == 0, printed.stderr
    maps = json.loads(printed.stdout)["items"]
    carried: dict[str, str] = {}
    for manifest in maps:
        validate(manifest)
        assert manifest["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert len(json.dumps(manifest)) < 1 << 20  # what a ConfigMap holds
        carried |= manifest["data"]
    there = {
        path.name: path.read_text() for path in Path(ROOT / "grafana/dashboards").glob("*.json")
    }
    assert carried == there


def sticky() -> Any:
    """The function `replica_for` of the documentation's example."""
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code, namespace)  # noqa: S102 - our own documentation
    return namespace["replica_for"]


def test_the_documented_choice_of_a_replica_keeps_prompts_where_they_were() -> None:
    replica_for = sticky()
    replicas = [f"10.0.0.{number}" for number in range(1, 9)]
    system = "You are a helpful assistant. " * 20
    prompts = [f"{number} {system}" for number in range(400)]
    before = {prompt: replica_for(prompt, replicas) for prompt in prompts}
    shares = [list(before.values()).count(replica) for replica in replicas]
    assert min(shares) > 400 / 8 / 2  # nobody is left out
    assert replica_for(prompts[0] + " and then?", replicas) == before[prompts[0]]
    # One more replica takes its share and moves nobody else.
    after = {prompt: replica_for(prompt, [*replicas, "10.0.0.9"]) for prompt in prompts}
    moved = {after[prompt] for prompt in prompts if after[prompt] != before[prompt]}
    assert moved == {"10.0.0.9"}
