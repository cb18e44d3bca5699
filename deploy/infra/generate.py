"""The files of this folder that repeat others, as `make generate` writes them.

`k8s_deployment.yaml` is the base's manifests in one file, for `kubectl apply -f`. The overlay of
Envoy Gateway needs `key.lua`, and kustomize reads no file outside an overlay's own folder.
"""

from __future__ import annotations

import re
from pathlib import Path

INFRA = Path(__file__).resolve().parent
_PLAIN = """\
# The API on Kubernetes in one file: kubectl apply -f deploy/infra/k8s_deployment.yaml
#
# Written by `make generate` from deploy/infra/base; deploy/infra/overlays has the variants.
"""
_COPY = "-- Written by `make generate`: a copy of deploy/gateway/key.lua.\n\n"


def files() -> dict[Path, str]:
    """The text of each generated file."""
    base = INFRA / "base"
    listed = (base / "kustomization.yaml").read_text("utf-8").partition("resources:")[2]
    manifests = [(base / name).read_text("utf-8") for name in re.findall(r"- (\S+)", listed)]
    key = (INFRA.parent / "gateway" / "key.lua").read_text("utf-8")
    return {
        INFRA / "k8s_deployment.yaml": _PLAIN + "".join(f"---\n{text}" for text in manifests),
        INFRA / "overlays" / "envoy-gateway" / "key.lua": _COPY + key,
    }
