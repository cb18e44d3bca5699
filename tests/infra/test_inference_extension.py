"""The overlay of the Inference Extension: the pool, its picker, and what the picker reads of us."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest
import yaml

from specops.http.app import _GENERATING
from specops.metrics.metrics import Metrics
from specops.runtime.kernels import BLOCK_TOKENS
from tests.infra.manifests import INFRA, Manifest, container, documents, one, rendered
from tests.infra.test_manifests import SCHEMAS, SELECTOR, validate

FOLDER = INFRA / "overlays" / "inference-extension"
NAMES = ("gateway.yaml", "pool.yaml", "picker.yaml")
MANIFESTS = [manifest for name in NAMES for manifest in documents((FOLDER / name).read_text())]
CONFIG: dict[str, Any] = yaml.safe_load((FOLDER / "picker-config.yaml").read_text())
# Of /generate and embeddings, the picker has no parser, or no use.
READ = {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"}


def parameters(plugin: str) -> dict[str, Any]:
    (found,) = (item for item in CONFIG["plugins"] if item["type"] == plugin)
    return dict(found["parameters"])


@pytest.mark.parametrize(
    "manifest", MANIFESTS, ids=lambda item: f"{item['kind']} {item['metadata']['name']}"
)
def test_every_manifest_fits_its_schema(manifest: Manifest) -> None:
    validate(manifest)


@pytest.mark.parametrize(
    "kind",
    [
        "inference.networking.k8s.io/v1/InferencePool",
        "gateway.networking.k8s.io/v1/HTTPRoute",
        "networking.istio.io/v1/DestinationRule",
    ],
)
def test_a_mistake_would_be_found(kind: str) -> None:
    assert kind in SCHEMAS
    broken = next(item for item in MANIFESTS if f"{item['apiVersion']}/{item['kind']}" == kind)
    broken = {**broken, "spec": {**broken["spec"], "selektor": {}}}
    with pytest.raises(jsonschema.ValidationError):
        validate(broken)


def test_the_pool_is_all_replicas_and_asks_the_picker() -> None:
    manifests = rendered("overlays/inference-extension")
    pool = one(manifests, "InferencePool")["spec"]
    assert pool["selector"]["matchLabels"] == SELECTOR
    (port,) = container(manifests)["ports"]
    assert pool["targetPorts"] == [{"number": port["containerPort"]}]
    reference = pool["endpointPickerRef"]
    service = one(manifests, "Service", reference["name"])["spec"]
    assert reference["port"]["number"] in {item["port"] for item in service["ports"]}
    picker = one(manifests, "Deployment", "specops-picker")["spec"]
    assert picker["template"]["metadata"]["labels"] == service["selector"]
    # No Service of the base and no budget counts the picker as a replica.
    assert picker["template"]["metadata"]["labels"] != SELECTOR


def test_the_picker_is_started_with_its_pool_and_its_file() -> None:
    manifests = rendered("overlays/inference-extension")
    spec = one(manifests, "Deployment", "specops-picker")["spec"]["template"]["spec"]
    (picker,) = spec["containers"]
    flags = dict(argument.removeprefix("--").split("=", 1) for argument in picker["args"])
    assert flags["pool-name"] == one(manifests, "InferencePool")["metadata"]["name"]
    (mount,) = picker["volumeMounts"]
    config = one(manifests, "ConfigMap", spec["volumes"][0]["configMap"]["name"])["data"]
    folder, _, name = flags["config-file"].rpartition("/")
    assert (folder, config[name]) == (
        mount["mountPath"],
        (FOLDER / "picker-config.yaml").read_text(),
    )
    account = one(manifests, "ServiceAccount", spec["serviceAccountName"])["metadata"]["name"]
    (subject,) = one(manifests, "RoleBinding", "specops-picker")["subjects"]
    assert subject["name"] == account


def test_the_picker_reads_series_that_there_are() -> None:
    extractor = parameters("core-metrics-extractor")
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
    assert parameters("metrics-data-source")["path"] == "/metrics"


def test_its_blocks_are_as_long_as_the_caches() -> None:
    assert parameters("approx-prefix-cache-producer")["blockSizeTokens"] == BLOCK_TOKENS


def test_every_plugin_that_is_named_is_declared() -> None:
    declared = {plugin.get("name", plugin["type"]) for plugin in CONFIG["plugins"]}
    (profile,) = CONFIG["schedulingProfiles"]
    named = {item["pluginRef"] for item in profile["plugins"]}
    named |= {item["pluginRef"] for item in CONFIG["requestHandler"]["parsers"]}
    assert named <= declared
    assert {"queue-scorer", "kv-cache-utilization-scorer", "prefix-cache-scorer"} <= named


def test_what_the_picker_can_read_is_routed_by_it() -> None:
    routes = [item for item in MANIFESTS if item["kind"] == "HTTPRoute"]
    (generating,) = (item for item in routes if item["metadata"]["name"] == "specops-generate")
    (rule,) = generating["spec"]["rules"]
    paths = {match["path"]["value"] for match in rule["matches"]}
    assert paths == READ
    assert READ < _GENERATING
    assert [item["kind"] for item in rule["backendRefs"]] == ["InferencePool"]
    settings = {item["name"]: item["value"] for item in container(rendered("base"))["env"]}
    for route in routes:
        (rule,) = route["spec"]["rules"]
        seconds = float(re.fullmatch(r"(\d+)s", rule["timeouts"]["request"])[1])  # type: ignore[index]
        assert seconds > float(settings["SPECOPS_REQUEST_TIMEOUT"])
