"""Prints the dashboards as ConfigMaps that Grafana's sidecar picks up.

    python deploy/infra/dashboards.py | kubectl apply --namespace monitoring -f -

The sidecar of Grafana's Helm chart loads every ConfigMap with the label `grafana_dashboard: "1"`.
"""

import json
import sys
from pathlib import Path
from typing import Any

DASHBOARDS = Path(__file__).resolve().parents[2] / "grafana" / "dashboards"


def config_map(path: Path) -> dict[str, Any]:
    """The ConfigMap of one dashboard."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"specops-dashboard-{path.stem.replace('_', '-')}",
            "labels": {"app.kubernetes.io/name": "specops", "grafana_dashboard": "1"},
            "annotations": {"grafana_folder": "Spec-Ops"},
        },
        "data": {path.name: path.read_text(encoding="utf-8")},
    }


def main() -> None:
    """Print a list of them, as JSON, which is YAML too."""
    maps = [config_map(path) for path in sorted(DASHBOARDS.glob("*.json"))]
    json.dump({"apiVersion": "v1", "kind": "List", "items": maps}, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
