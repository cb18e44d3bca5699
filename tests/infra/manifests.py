"""The manifests, plain and as kustomize renders them, and the schemas that they must fit."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.stack.support import ROOT, succeed, tool

INFRA = ROOT / "infra"
KUSTOMIZED = sorted(
    str(path.parent.relative_to(INFRA)) for path in INFRA.rglob("kustomization.yaml")
)
OLDEST = "1.30"  # the first version with preStop's sleep
CRDS = [json.loads(path.read_text()) for path in (Path(__file__).parent / "crds").glob("*.json")]
# The projects' own schemas, with their version and licence; descriptions are left out.
SCHEMAS: dict[str, Any] = {
    name: schema for project in CRDS for name, schema in project["schemas"].items()
}
CUSTOM = {("keda.sh/v1alpha1", "ScaledObject"), ("monitoring.coreos.com/v1", "PodMonitor")}

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


def validate(manifest: Manifest) -> None:
    """Check a manifest strictly against the schemas of the oldest and the newest version."""
    if (manifest["apiVersion"], manifest["kind"]) in CUSTOM:
        return  # the operators have the schemas of these
    if schema := SCHEMAS.get(f"{manifest['apiVersion']}/{manifest['kind']}"):
        # Every resource has these fields; not every project's schema says so.
        common = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {}}
        schema = {**schema, "properties": {**common, **schema["properties"]}}
        jsonschema.Draft202012Validator(_strict(schema)).validate(manifest)
        return
    for version in (OLDEST, kubernetes_validate.latest_version()):
        kubernetes_validate.validate(manifest, version, strict=True)
