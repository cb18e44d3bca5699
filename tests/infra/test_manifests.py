"""The manifests are valid, agree with each other and promise what the service keeps."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from specops.config import PREFIX, Settings
from specops.http.app import _GENERATING, create_app
from specops.http.routes import embeddings, ollama
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
GATEWAY_API = sorted((Path(__file__).parent / "crds").glob("*.json"))
# The projects' own schemas, with their version and licence; descriptions are left out.
SCHEMAS: dict[str, Any] = {
    name: schema
    for path in GATEWAY_API
    for name, schema in json.loads(path.read_text())["schemas"].items()
}
CUSTOM = {("keda.sh/v1alpha1", "ScaledObject"), ("monitoring.coreos.com/v1", "PodMonitor")}
SELECTOR = {"app.kubernetes.io/name": "specops", "app.kubernetes.io/component": "api"}
every_overlay = pytest.mark.parametrize(
    "name", [str(folder.relative_to(INFRA)) for folder in KUSTOMIZED]
)


def strictly(schema: Any) -> Any:
    """The schema, refusing fields that it does not name, as an API server's strict check does."""
    if isinstance(schema, list):
        return [strictly(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: strictly(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        if schema["properties"].keys() & {"apiVersion", "metadata"}:
            found["properties"]["metadata"] = {"type": "object"}
        found["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    return found


def validate(manifest: dict[str, Any]) -> None:
    """Hold a manifest against the schemas of the oldest and the newest version, strictly."""
    if (manifest["apiVersion"], manifest["kind"]) in CUSTOM:
        return  # their schemas are the operators' own
    if schema := SCHEMAS.get(f"{manifest['apiVersion']}/{manifest['kind']}"):
        # Every resource has these; not every project's schema says so.
        common = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {}}
        schema = {**schema, "properties": {**common, **schema["properties"]}}
        jsonschema.Draft202012Validator(strictly(schema)).validate(manifest)
        return
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


ENVOY = INFRA / "overlays" / "envoy-gateway"


def gateway_manifests() -> list[dict[str, Any]]:
    """The overlay's own manifests, without kustomize."""
    return [
        manifest
        for name in ("gateway.yaml", "policies.yaml")
        for manifest in documents((ENVOY / name).read_text())
    ]


@pytest.mark.parametrize("path", GATEWAY_API, ids=lambda path: path.stem)
def test_a_schema_says_whose_it_is(path: Path) -> None:
    whole = json.loads(path.read_text())
    assert whole["project"]
    assert whole["version"].startswith("v")
    assert whole["license"] == "Apache-2.0"


@pytest.mark.parametrize(
    "manifest",
    gateway_manifests(),
    ids=lambda manifest: f"{manifest['kind']} {manifest['metadata']['name']}",
)
def test_the_gateways_manifests_fit_the_projects_schemas(manifest: dict[str, Any]) -> None:
    assert f"{manifest['apiVersion']}/{manifest['kind']}" in SCHEMAS
    validate(manifest)
    broken = json.loads(json.dumps(manifest))
    broken["spec"]["readyness"] = {}
    with pytest.raises(jsonschema.ValidationError):
        validate(broken)


def test_the_gateways_policy_is_that_of_one_machine() -> None:
    config = yaml.safe_load((ROOT / "gateway" / "envoy.yaml").read_text())
    cluster = config["static_resources"]["clusters"][0]
    (check,), outliers = cluster["health_checks"], cluster["outlier_detection"]
    policies = [item for item in gateway_manifests() if item["kind"] == "BackendTrafficPolicy"]
    assert len(policies) == 2
    for policy in policies:
        spec = policy["spec"]
        active, passive = spec["healthCheck"]["active"], spec["healthCheck"]["passive"]
        assert active["http"]["path"] == check["http_health_check"]["path"]
        for ours, theirs in (("timeout", "timeout"), ("interval", "interval")):
            assert active[theirs] == check[ours]
        assert active["unhealthyThreshold"] == check["unhealthy_threshold"]
        assert passive["maxEjectionPercent"] == outliers["max_ejection_percent"]
        assert passive["baseEjectionTime"] == outliers["base_ejection_time"]
        retry = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
        own = retry["typed_config"]["route_config"]["virtual_hosts"][0]["retry_policy"]
        assert ",".join(spec["retry"]["retryOn"]["triggers"]) == own["retry_on"]
        assert spec["retry"]["retryOn"]["httpStatusCodes"] == own["retriable_status_codes"]
        assert spec["retry"]["numRetries"] == own["num_retries"]
    assert (ENVOY / "key.lua").read_text() == (ROOT / "gateway" / "key.lua").read_text()


def test_the_same_paths_are_routed_by_key() -> None:
    (route,) = (
        item
        for item in gateway_manifests()
        if item["kind"] == "HTTPRoute" and item["metadata"]["name"] == "specops-generate"
    )
    paths = {match["path"]["value"] for match in route["spec"]["rules"][0]["matches"]}
    assert paths == _GENERATING - {embeddings.PATH, ollama.EMBED_PATH}
