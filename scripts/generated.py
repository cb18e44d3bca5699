"""Files that a program of ours writes, or a part of them: how they are written, and compared."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path


def replaced(text: str, name: str, lines: list[str]) -> str:
    """`text` with `lines` between its two lines that are marked with `name`.

    These are a line with `NAME: begin` and one with `NAME: end`.
    """
    old = text.splitlines()
    (first,) = (number for number, line in enumerate(old) if f"{name}: begin" in line)
    (last,) = (number for number, line in enumerate(old) if f"{name}: end" in line)
    return "\n".join([*old[: first + 1], *lines, *old[last:]]) + "\n"


def update(wanted: Mapping[Path, str], program: str) -> int:
    """Write the files whose text is another one; with `--check`, only name them.

    Returns:
        The exit status: 1 if `--check` has found one.
    """
    parser = argparse.ArgumentParser(description=f"Writes {', '.join(p.name for p in wanted)}.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if one is old")
    check = parser.parse_args().check
    stale = [
        path
        for path, text in wanted.items()
        if not path.exists() or path.read_text("utf-8") != text
    ]
    for path in stale:
        if check:
            print(f"{path} is out of date: run .venv/bin/python {program}", file=sys.stderr)
        else:
            path.write_text(wanted[path], "utf-8")
    return int(check and bool(stale))
