"""The manifests, plain and as kustomize renders them, and the schemas that they must fit."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.stack.support import ROOT, succeed, tool

INFRA = ROOT / "deploy" / "infra"
KUSTOMIZED = sorted(
    str(path.parent.relative_to(INFRA)) for path in INFRA.rglob("kustomization.yaml")
)
OLDEST = "1.30"  # the first version with preStop's sleep
CRDS = json.loads(Path(__file__).with_name("crds.json").read_text())
# The projects' own schemas, with their version and licence; descriptions are left out.
SCHEMAS: dict[str, Any] = {
    name: schema for project in CRDS for name, schema in project["schemas"].items()
}
# Resources of operators whose schemas are too large to keep: the fields that we use, with types.
CUSTOM: dict[str, Any] = {
    "keda.sh/v1alpha1/ScaledObject": {
        **{"scaleTargetRef": {"name": str}, "pollingInterval": int},
        **{"minReplicaCount": int, "maxReplicaCount": int},
        "fallback": {"failureThreshold": int, "replicas": int, "behavior": str},
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": {
            "stabilizationWindowSeconds": int,
            "policies": [{"type": str, "value": int, "periodSeconds": int}],
        }}}},
        "triggers": [{
            **{"type": str, "metricType": str},
            "metadata": {"serverAddress": str, "query": str, "threshold": str},
        }],
    },
    "monitoring.coreos.com/v1/PodMonitor": {
        **{"selector": {"matchLabels": dict}, "jobLabel": str},
        "podMetricsEndpoints": [{
            **{"port": str, "path": str, "interval": str, "scrapeTimeout": str},
            "relabelings": [{"sourceLabels": list, "targetLabel": str}],
        }],
    },
}  # fmt: skip

Manifest = dict[str, Any]


def documents(path: str) -> list[Manifest]:
    """The manifests in a file of infra/."""
    return [document for document in yaml.safe_load_all((INFRA / path).read_text()) if document]


@cache
def _rendered(name: str) -> str:
    command = ("kustomize", "build") if tool("kustomize") else ("kubectl", "kustomize")
    if tool(command[0]) is None:
        pytest.skip("neither kubectl nor kustomize is here to render the overlays")
    return succeed(*command, INFRA / name)


def rendered(name: str) -> list[Manifest]:
    """What kustomize makes of a folder of infra/; skips if kustomize is missing."""
    return [document for document in yaml.safe_load_all(_rendered(name)) if document]


def one(manifests: list[Manifest], kind: str, name: str = "specops") -> Any:
    """The manifest of this kind and name."""
    (found,) = (
        manifest
        for manifest in manifests
        if (manifest["kind"], manifest["metadata"]["name"]) == (kind, name)
    )
    return found


def pod(manifests: list[Manifest]) -> Any:
    """The Deployment's pod."""
    return one(manifests, "Deployment")["spec"]["template"]["spec"]


def container(manifests: list[Manifest]) -> Any:
    """The Deployment's one container."""
    (found,) = pod(manifests)["containers"]
    return found


def _strict(schema: Any) -> Any:
    """The schema, which then refuses unknown fields, as an API server's strict check does."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _strict(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        if schema["properties"].keys() & {"apiVersion", "metadata"}:
            found["properties"]["metadata"] = {"type": "object"}
        found["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    return found


def _has_shape(value: Any, shape: Any, name: str = "spec") -> None:
    """Check that a value has the shape's types, and no field that is not in it."""
    if isinstance(shape, type):
        assert isinstance(value, shape), f"{name}: {value!r}"
    elif isinstance(shape, list):
        for item in value:
            _has_shape(item, shape[0], f"{name}[]")
    else:
        assert value.keys() <= shape.keys(), f"{name}: {value.keys() - shape.keys()}"
        for key, item in value.items():
            _has_shape(item, shape[key], f"{name}.{key}")


def validate(manifest: Manifest) -> None:
    """Check a manifest strictly against the schemas of the oldest and the newest version."""
    kind = f"{manifest['apiVersion']}/{manifest['kind']}"
    if kind in CUSTOM:
        _has_shape(manifest["spec"], CUSTOM[kind])
        return
    if schema := SCHEMAS.get(kind):
        # Every resource has these fields; not every project's schema says so.
        common = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {}}
        schema = {**schema, "properties": {**common, **schema["properties"]}}
        jsonschema.Draft202012Validator(_strict(schema)).validate(manifest)
        return
    for version in (OLDEST, kubernetes_validate.latest_version()):
        kubernetes_validate.validate(manifest, version, strict=True)
