"""The manifests are valid, agree with each other and promise what the service keeps."""

import json
import re
import sys
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from deploy.gateway import run as gateway
from specops.config import PREFIX, Settings
from specops.http.app import create_app
from specops.http.protocols import PROTOCOLS
from specops.http.security.hosts import Hosts
from specops.metrics.metrics import Metrics
from specops.runtime.kernels import BLOCK_TOKENS
from tests.deploy.infra.manifests import (
    CRDS,
    INFRA,
    KUSTOMIZED,
    SCHEMAS,
    container,
    documents,
    one,
    pod,
    rendered,
    validate,
)
from tests.http.openai_api import PROMPTS
from tests.stack.support import ROOT, read_yaml, succeed

FILE = "base/k8s_deployment.yaml"
PLAIN = documents(FILE)
SELECTOR = {"app.kubernetes.io/name": "specops", "app.kubernetes.io/component": "api"}
GATEWAY, PICKER = "overlays/envoy-gateway", "overlays/inference-extension"
GATEWAY_FILES = [f"{GATEWAY}/{name}.yaml" for name in ("gateway", "policies")]
PICKER_FILES = [f"{PICKER}/{name}.yaml" for name in ("gateway", "pool", "picker")]
every_overlay = pytest.mark.parametrize("name", KUSTOMIZED)


# -- validity ----------------------------------------------------------------------------------


def test_the_plain_file_is_valid() -> None:
    for manifest in PLAIN:
        validate(manifest)
    broken = documents(FILE)
    container(broken)["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(one(broken, "Deployment"))


def test_gateway_manifests_fit_the_projects_schemas_without_kustomize() -> None:
    for project in CRDS:
        assert project["project"]
        assert project["version"].startswith("v")
        assert project["license"] == "Apache-2.0"
    checked = set()
    for path in (*GATEWAY_FILES, *PICKER_FILES):
        for manifest in documents(path):
            validate(manifest)
            kind = f"{manifest['apiVersion']}/{manifest['kind']}"
            assert kind in SCHEMAS or path == PICKER_FILES[2], kind
            if kind in SCHEMAS:
                checked.add(manifest["kind"])
                with pytest.raises(jsonschema.ValidationError):
                    validate({**manifest, "spec": {**manifest["spec"], "selektor": {}}})
    assert checked >= {"InferencePool", "HTTPRoute", "DestinationRule", "BackendTrafficPolicy"}


@every_overlay
def test_what_kustomize_renders_is_valid_and_selects_the_same_unprivileged_pods(name: str) -> None:
    manifests = rendered(name)
    for manifest in manifests:
        validate(manifest)
    deployment = one(manifests, "Deployment")["spec"]
    assert deployment["selector"]["matchLabels"] == SELECTOR
    assert deployment["template"]["metadata"]["labels"] == SELECTOR
    assert one(manifests, "Service")["spec"]["selector"] == SELECTOR
    assert one(manifests, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == SELECTOR
    assert one(manifests, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == SELECTOR
    whole, own = pod(manifests)["securityContext"], container(manifests)["securityContext"]
    (user,) = re.findall(r"^USER (\d+):(\d+)$", (ROOT / "api/Dockerfile").read_text(), re.MULTILINE)
    assert (str(whole["runAsUser"]), str(whole["runAsGroup"])) == user
    assert whole["runAsNonRoot"] is True
    assert whole["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own["readOnlyRootFilesystem"] is True
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert pod(manifests)["automountServiceAccountToken"] is False
    mounts = {item["mountPath"]: item["name"] for item in container(manifests)["volumeMounts"]}
    assert set(mounts) == {"/var/cache/specops", "/tmp"}  # noqa: S108
    assert set(mounts.values()) == {item["name"] for item in pod(manifests)["volumes"]}


# -- agreement with the service ----------------------------------------------------------------


def service_settings() -> Settings:
    """The settings that the container's environment makes."""
    return Settings.from_env(environment(PLAIN))


def environment(manifests: list[dict[str, Any]]) -> dict[str, str]:
    """The container's environment, in the namespace `llm`."""
    values: dict[str, str] = {}
    for item in container(manifests)["env"]:
        source = item.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        secret = item.get("valueFrom", {}).get("secretKeyRef")
        if secret is not None:
            assert secret["optional"]  # without it pods would not start before there is a key
            continue
        value = {"metadata.namespace": "llm"}[source] if source else item["value"]
        values[item["name"]] = re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], value)
    return values


def test_probes_ask_what_the_service_answers() -> None:
    names = ("startup", "readiness", "liveness")
    probes = [container(PLAIN)[f"{name}Probe"]["httpGet"]["path"] for name in names]
    assert probes == ["/health", "/health", "/health/live"]
    app = create_app(Settings())
    paths = {getattr(route, "path", None) for route in app.routes} | set(app.openapi()["paths"])
    assert set(probes) <= paths
    startup = container(PLAIN)["startupProbe"]  # a first start may download for half an hour
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800


def test_the_grace_period_is_longer_than_the_longest_answer() -> None:
    settings = service_settings()
    pause = container(PLAIN)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert settings.drain_timeout >= settings.request_timeout
    assert pod(PLAIN)["terminationGracePeriodSeconds"] > settings.drain_timeout + pause


@every_overlay
def test_replicas_answer_under_every_name_of_their_service(name: str) -> None:
    settings = Settings.from_env(environment(rendered(name)))
    hosts = Hosts(settings.allowed_hosts, {})
    service = one(rendered(name), "Service")["metadata"]["name"]
    for end in ("", ".llm", ".llm.svc", ".llm.svc.cluster.local", ".llm.svc.cluster.local."):
        assert hosts.answers_to(service + end)
    assert hosts.answers_to("10.42.0.7:8000")  # kubelet, at the pod's address
    # A gateway decides itself which public names it has.
    assert hosts.answers_to("llm.example.org") == (name in (GATEWAY, PICKER))
    assert not settings.api_keys


def test_no_service_of_the_cluster_reaches_the_settings() -> None:
    # A Service named `specops` becomes SPECOPS_PORT in every pod that has service links.
    assert one(PLAIN, "Service")["metadata"]["name"].upper() + "_" == PREFIX
    assert pod(PLAIN)["enableServiceLinks"] is False


def test_image_memory_and_port_are_those_of_compose_and_the_service() -> None:
    compose = read_yaml("compose.yaml")["services"]["api"]
    resources = container(PLAIN)["resources"]
    for part in (resources["limits"], resources["requests"]):
        assert (part["cpu"], part["memory"]) == ("2", "4Gi")
    assert compose["mem_limit"] == "4g"
    assert container(PLAIN)["image"] == compose["image"]
    (rule,) = one(PLAIN, "NetworkPolicy")["spec"]["ingress"]
    (port,) = container(PLAIN)["ports"]
    assert [item["port"] for item in rule["ports"]] == [port["containerPort"]]


def test_the_base_scales_on_cpu_and_the_queue_overlay_on_requests_alone() -> None:
    (metric,) = one(PLAIN, "HorizontalPodAutoscaler")["spec"]["metrics"]
    target = {"type": "Utilization", "averageUtilization": 70}
    assert metric["resource"] == {"name": "cpu", "target": target}
    manifests = rendered("overlays/queue")
    assert "HorizontalPodAutoscaler" not in {item["kind"] for item in manifests}
    scaled = one(manifests, "ScaledObject")["spec"]
    assert scaled["scaleTargetRef"] == {"name": "specops"}
    (trigger,) = scaled["triggers"]
    names = set(re.findall(r"specops_\w+", trigger["metadata"]["query"]))
    assert "specops_requests_waiting" in names
    assert names <= {family.name for family in Metrics().registry.collect()}


def test_the_monitor_reads_the_named_port_under_the_job_of_the_dashboards() -> None:
    manifests = rendered("overlays/monitoring")
    monitor = one(manifests, "PodMonitor")["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in container(manifests)["ports"]}
    (named,) = endpoint["relabelings"]  # the dashboards' legends
    assert named == {"sourceLabels": ["__meta_kubernetes_pod_name"], "targetLabel": "instance"}
    assert monitor["selector"]["matchLabels"] == SELECTOR
    scraped = read_yaml("prometheus/prometheus.yml")["scrape_configs"]
    assert SELECTOR[monitor["jobLabel"]] == scraped[0]["job_name"]


def test_every_dashboard_becomes_a_config_map_that_the_sidecar_finds() -> None:
    carried: dict[str, str] = {}
    for manifest in json.loads(succeed(sys.executable, INFRA / "dashboards.py"))["items"]:
        validate(manifest)
        assert manifest["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert len(json.dumps(manifest)) < 1 << 20  # the limit of a ConfigMap
        carried |= manifest["data"]
    folder = ROOT / "grafana" / "dashboards"
    assert carried == {path.name: path.read_text() for path in folder.glob("*.json")}


# -- routes ------------------------------------------------------------------------------------


def generating_route(path: str) -> Any:
    """The rule of the route for requests that generate, and the set of its paths."""
    (rule,) = one(documents(path), "HTTPRoute", "specops-generate")["spec"]["rules"]
    return rule, {match["path"]["value"] for match in rule["matches"]}


def test_envoy_gateway_has_the_policy_of_one_machine() -> None:
    config = yaml.safe_load(gateway.configuration(gateway.Options()))["static_resources"]
    cluster = config["clusters"][0]
    (check,), outliers = cluster["health_checks"], cluster["outlier_detection"]
    http = config["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    retry = http["route_config"]["virtual_hosts"][0]["retry_policy"]
    manifests = [manifest for path in GATEWAY_FILES for manifest in documents(path)]
    policies = [one["spec"] for one in manifests if one["kind"] == "BackendTrafficPolicy"]
    assert len(policies) == 2
    for policy in policies:
        active, passive = policy["healthCheck"]["active"], policy["healthCheck"]["passive"]
        assert active["http"]["path"] == check["http_health_check"]["path"]
        assert (active["timeout"], active["interval"]) == (check["timeout"], check["interval"])
        assert active["unhealthyThreshold"] == check["unhealthy_threshold"]
        assert passive["maxEjectionPercent"] == outliers["max_ejection_percent"]
        assert passive["baseEjectionTime"] == outliers["base_ejection_time"]
        assert ",".join(policy["retry"]["retryOn"]["triggers"]) == retry["retry_on"]
        assert policy["retry"]["retryOn"]["httpStatusCodes"] == retry["retriable_status_codes"]
        assert policy["retry"]["numRetries"] == retry["num_retries"]
    _, paths = generating_route(GATEWAY_FILES[0])
    assert paths == {path for path, prompt in PROMPTS.items() if prompt.operation != "embeddings"}


def test_the_picker_routes_what_it_can_read() -> None:
    rule, paths = generating_route(PICKER_FILES[0])
    # It has no parser for /generate, and no use for embeddings.
    assert paths == {
        f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "responses")
    }
    assert paths < set(PROTOCOLS.prompts)
    assert [item["kind"] for item in rule["backendRefs"]] == ["InferencePool"]
    for route in (item for item in documents(PICKER_FILES[0]) if item["kind"] == "HTTPRoute"):
        (rule,) = route["spec"]["rules"]
        seconds = float(rule["timeouts"]["request"].removesuffix("s"))
        assert seconds > service_settings().request_timeout


def test_the_picker_reads_existing_series_and_plugins() -> None:
    config = yaml.safe_load((INFRA / PICKER / "picker-config.yaml").read_text())
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    extractor = plugins["core-metrics-extractor"]
    (engine,) = extractor["engineConfigs"]
    assert engine.pop("name") == extractor["defaultEngine"]
    assert set(engine) == {"queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec"}
    samples = {
        sample.name: sample.labels
        for family in Metrics().registry.collect()
        for sample in family.samples
    }
    for series in engine.values():
        assert samples[series] == {}, f"the picker takes one number: {series}"
    assert plugins["metrics-data-source"]["path"] == "/metrics"
    assert plugins["approx-prefix-cache-producer"]["blockSizeTokens"] == BLOCK_TOKENS
    declared = {plugin.get("name", plugin["type"]) for plugin in config["plugins"]}
    (profile,) = config["schedulingProfiles"]
    named = {item["pluginRef"] for item in profile["plugins"]}
    named |= {item["pluginRef"] for item in config["requestHandler"]["parsers"]}
    assert {"queue-scorer", "kv-cache-utilization-scorer", "prefix-cache-scorer"} <= named
    assert named <= declared


def test_the_pool_is_all_replicas_and_asks_the_picker_which_has_its_file() -> None:
    manifests = rendered(PICKER)
    pool = one(manifests, "InferencePool")
    assert pool["spec"]["selector"]["matchLabels"] == SELECTOR
    (port,) = container(manifests)["ports"]
    assert pool["spec"]["targetPorts"] == [{"number": port["containerPort"]}]
    reference = pool["spec"]["endpointPickerRef"]
    service = one(manifests, "Service", reference["name"])["spec"]
    assert reference["port"]["number"] in {item["port"] for item in service["ports"]}
    template = one(manifests, "Deployment", "specops-picker")["spec"]["template"]
    assert template["metadata"]["labels"] == service["selector"]
    # No Service of the base and no budget counts the picker as a replica.
    assert template["metadata"]["labels"] != SELECTOR
    spec = template["spec"]
    (picker,) = spec["containers"]
    flags = dict(argument.removeprefix("--").split("=", 1) for argument in picker["args"])
    assert flags["pool-name"] == pool["metadata"]["name"]
    (mount,) = picker["volumeMounts"]
    config = one(manifests, "ConfigMap", spec["volumes"][0]["configMap"]["name"])["data"]
    folder, _, name = flags["config-file"].rpartition("/")
    assert folder == mount["mountPath"]
    assert config[name] == (INFRA / PICKER / "picker-config.yaml").read_text()
    account = one(manifests, "ServiceAccount", spec["serviceAccountName"])["metadata"]["name"]
    (subject,) = one(manifests, "RoleBinding", "specops-picker")["subjects"]
    assert subject["name"] == account
