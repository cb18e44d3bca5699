"""Writes the files and tables that repeat the code (`make generate`), or compares them (`--check`).

These are tables in pages (fields, presets, figures, clients), settings, metrics, dashboards and an
overlay's script. `--check` writes nothing and fails if one is out of date; `scripts/lint` runs it.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grafana"))

from grafana import generate as dashboards
from scripts.generated import metrics, pages, settings
from tests.clients import table as clients

ROOT = Path(__file__).resolve().parents[1]
# kustomize reads no files outside an overlay's folder.
GATEWAY_KEY = ROOT / "deploy" / "gateway" / "key.lua"
KEY = ROOT / "deploy" / "infra" / "overlays" / "envoy-gateway" / "key.lua"
_COPY = "-- Written by `make generate`: a copy of deploy/gateway/key.lua.\n\n"
Parts = Mapping[Path, Mapping[str, list[str]]]


def replaced(text: str, name: str, lines: list[str]) -> str:
    """Replace the lines between two marks of a text.

    Args:
        text: has one line with `NAME: begin` and one with `NAME: end`.
        name: name of the marks.
        lines: the lines between them.
    """
    old = text.splitlines()
    (first,) = (number for number, line in enumerate(old) if f"{name}: begin" in line)
    (last,) = (number for number, line in enumerate(old) if f"{name}: end" in line)
    return "\n".join([*old[: first + 1], *lines, *old[last:]]) + "\n"


def wanted() -> dict[Path, str]:
    """The text of every file that is written here, as a whole or in part."""
    files = {**dashboards.files(), **settings.files(), KEY: _COPY + GATEWAY_KEY.read_text("utf-8")}
    files[metrics.PAGE] = metrics.page()
    parts: tuple[Parts, ...] = (pages.parts(), settings.parts(), clients.parts())
    for path, tables in ((path, tables) for one in parts for path, tables in one.items()):
        text = files.get(path) or path.read_text("utf-8")
        for name, lines in tables.items():
            text = replaced(text, name, lines)
        files[path] = text
    return files


def main() -> int:
    """Return 1 if `--check` finds an outdated file, or if a dashboard has no generator; else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only fail if a file is out of date")
    check, files = parser.parse_args().check, wanted()
    strangers = [path for path in dashboards.FOLDER.glob("*.json") if path not in files]
    for path in strangers:
        print(f"{path} has no generator", file=sys.stderr)
    stale = [
        path for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text
    ]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} is out of date: run `make generate`", file=sys.stderr)
        else:
            path.write_text(files[path], "utf-8")
    return int((check and bool(stale)) or bool(strangers))


if __name__ == "__main__":
    sys.exit(main())
