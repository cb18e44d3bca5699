"""The manifests as they are applied: plain, and rendered by kustomize."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import yaml

from tests.stack.support import ROOT, run, tool

INFRA = ROOT / "infra"
PLAIN = INFRA / "k8s_deployment.yaml"
KUSTOMIZED = sorted(path.parent for path in INFRA.rglob("kustomization.yaml"))

Manifest = dict[str, Any]


def documents(text: str) -> list[Manifest]:
    """The manifests of a YAML stream."""
    return [document for document in yaml.safe_load_all(text) if document]


def plain() -> list[Manifest]:
    """infra/k8s_deployment.yaml."""
    return documents(PLAIN.read_text())


@cache
def _rendered(folder: str) -> str:
    command = ("kustomize", "build") if tool("kustomize") else ("kubectl", "kustomize")
    if tool(command[0]) is None:
        pytest.skip("neither kubectl nor kustomize is here to render the overlays")
    done = run(*command, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(name: str) -> list[Manifest]:
    """What kustomize makes of a folder of infra/; skips where there is no kustomize."""
    return documents(_rendered(str(INFRA / name)))


def one(manifests: list[Manifest], kind: str, name: str = "specops") -> Manifest:
    """The manifest of this kind and name."""
    (found,) = (
        manifest
        for manifest in manifests
        if (manifest["kind"], manifest["metadata"]["name"]) == (kind, name)
    )
    return found


def pod(manifests: list[Manifest]) -> dict[str, Any]:
    """The Deployment's pod."""
    spec: dict[str, Any] = one(manifests, "Deployment")["spec"]["template"]["spec"]
    return spec


def container(manifests: list[Manifest]) -> dict[str, Any]:
    """The Deployment's one container."""
    (found,) = pod(manifests)["containers"]
    return dict(found)
