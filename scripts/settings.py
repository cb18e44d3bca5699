"""Carries the service's settings to where they are repeated: `python scripts/settings.py`.

.env.example, the table in README.md and the API's environment in compose.yaml come from
api/specops/config.py. `--check` writes nothing and fails where one of them has fallen behind.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from specops.config import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[1]
ENV_EXAMPLE = ROOT / ".env.example"
README = ROOT / "README.md"
COMPOSE = ROOT / "compose.yaml"
BEGIN, END = "settings: begin", "settings: end"  # in the lines around what is written here
IN_CONTAINER = {"SPECOPS_HOST", "SPECOPS_PORT", "SPECOPS_MODELS_DIR", "SPECOPS_CACHE_DIR"}

HEADER = """\
# Settings of the stack: copy to .env and uncomment what you change. Docker Compose and `make up`
# read it; an empty value means the default, which is what stands here.

"""

# What compose.yaml and scripts/ read, not the service itself: name, default, meaning.
STACK = (
    ("PROMETHEUS_PORT", "9090", "port of Prometheus on this machine"),
    ("GRAFANA_PORT", "3000", "port of Grafana on this machine (Docker)"),
    ("LOCUST_PORT", "8089", "port of Locust's page on this machine (Docker)"),
    ("GRAFANA_ADMIN_PASSWORD", "", "password of Grafana's `admin`; empty: a random one each start"),
    ("STOP_GRACE_PERIOD", "40s", "longer than SPECOPS_DRAIN_TIMEOUT (Docker)"),
    ("PYTHON_IMAGE", "python:3.11-slim", "base of the images that are built here (Docker)"),
    ("LOAD_SHAPE", "smoke", "load that Locust plays: smoke, ramp, spike, steady, arrivals"),
)


def default_of(item: Field[Any]) -> str:
    """A setting's default as it would be written in .env."""
    value = item.default
    if isinstance(value, Path):
        for base, name in ((ROOT, "."), (Path.home(), "~")):
            if value.is_relative_to(base):
                return f"{name}/{value.relative_to(base)}"
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def service_rows() -> list[tuple[str, str, str]]:
    """Name, default and meaning of every setting of the service."""
    return [
        (PREFIX + item.name.upper(), default_of(item), str(item.metadata["help"]))
        for item in fields(Settings)
    ]


def env_example() -> str:
    """The text of .env.example."""
    rows = [*service_rows(), *STACK]
    return HEADER + "\n".join(
        f"# {meaning}\n#{name}={default}\n" for name, default, meaning in rows
    )


def readme() -> str:
    """README.md with the current table."""
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    for name, default, meaning in (*service_rows(), *STACK):
        lines.append(f"| `{name}` | {f'`{default}`' if default else ''} | {meaning} |")
    return replaced(README.read_text(), lines)


def compose() -> str:
    """compose.yaml with every setting passed on, except what only the container decides."""
    names = [name for name, _, _ in service_rows() if name not in IN_CONTAINER]
    return replaced(COMPOSE.read_text(), [f"      {name}: ${{{name}:-}}" for name in names])


def replaced(text: str, lines: list[str]) -> str:
    """`text` with `lines` between its two marked lines."""
    old = text.splitlines()
    (first,) = (number for number, line in enumerate(old) if BEGIN in line)
    (last,) = (number for number, line in enumerate(old) if END in line)
    return "\n".join([*old[: first + 1], *lines, *old[last:]]) + "\n"


def main() -> int:
    """Write or check all three; the exit status is 1 if `--check` finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    wanted = {ENV_EXAMPLE: env_example(), README: readme(), COMPOSE: compose()}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if check:
            print(f"{path.name} and api/specops/config.py disagree", file=sys.stderr)
        else:
            path.write_text(wanted[path])
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
