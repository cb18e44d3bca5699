"""Text files are read and written as UTF-8, whatever the locale of the machine says."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Where text and encoding stand among the positional arguments.
METHODS = {"read_text": 0, "write_text": 1}
SHIPPED = ("api/specops", "deploy", "grafana", "loadtest", "scripts", "training", "bench")


def without_encoding(source: str) -> Iterator[int]:
    """Lines of calls that take the locale's encoding."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        named = {keyword.arg for keyword in node.keywords}
        if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            if len(node.args) <= METHODS[node.func.attr] and "encoding" not in named:
                yield node.lineno
        elif isinstance(node.func, ast.Name) and node.func.id == "open" and "encoding" not in named:
            mode = node.args[1] if len(node.args) > 1 else None
            if not (isinstance(mode, ast.Constant) and "b" in str(mode.value)):
                yield node.lineno


@pytest.mark.parametrize("folder", SHIPPED)
def test_every_text_file_has_an_encoding(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line in without_encoding(path.read_text("utf-8"))
    ]
    assert not found


def test_the_check_finds_what_it_is_for() -> None:
    source = "p.read_text()\np.write_text(x)\nopen(p)\nopen(p, 'w')\nopen(p, 'rb')\n"
    source += "p.read_text('utf-8')\np.write_text(x, 'utf-8')\np.read_text(encoding='utf-8')\n"
    assert list(without_encoding(source)) == [1, 2, 3, 4]
