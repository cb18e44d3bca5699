"""The dashboards that `make generate` writes, and that Grafana is provisioned with.

They are written in Python (grafana/panels.py has the building blocks) and committed as JSON, so
that a running stack needs no generator.
"""

import json
from pathlib import Path
from typing import Any

import capacity
import healthy
import latency
import speculation

LINE = 100  # characters
FOLDER = Path(__file__).parent / "dashboards"
DASHBOARDS = {
    f"{module.__name__}.json": module.build for module in (healthy, speculation, latency, capacity)
}


def _written(value: Any, indent: str = "") -> str:
    """JSON with each list and object on one line if that is short enough."""
    line = json.dumps(value, sort_keys=True, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(indent) + len(line) <= LINE:
        return line
    inner = indent + "  "
    if isinstance(value, list):
        items = [_written(item, inner) for item in value]
    else:
        items = [f"{json.dumps(key)}: {_written(value[key], inner)}" for key in sorted(value)]
    opening, closing = "[]" if isinstance(value, list) else "{}"
    return f"{opening}\n{inner}" + f",\n{inner}".join(items) + f"\n{indent}{closing}"


def files() -> dict[Path, str]:
    """The text of each dashboard, sorted by name."""
    return {FOLDER / name: _written(DASHBOARDS[name]()) + "\n" for name in sorted(DASHBOARDS)}
