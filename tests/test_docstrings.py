"""Public functions with more than two parameters say what each one is, and what they raise."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parent.parent / "api" / "specops"
FILES = [
    file
    for name in ("http", "text", "models", "system")
    for file in (PACKAGES / name).rglob("*.py")
]
Function = ast.FunctionDef | ast.AsyncFunctionDef
TREES = {file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
CLASSES = {
    node.name: node
    for tree in TREES.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef)
}


def public(
    node: ast.Module | ast.ClassDef, around: tuple[ast.ClassDef, ...] = ()
) -> Iterator[tuple[Function, tuple[ast.ClassDef, ...]]]:
    """Yield public functions and constructors, with the classes around them."""
    for item in node.body:
        name = getattr(item, "name", "_")
        if isinstance(item, ast.ClassDef) and not name.startswith("_"):
            yield from public(item, (*around, item))
        elif isinstance(item, Function) and (name == "__init__" or not name.startswith("_")):
            yield item, around


def parameters(function: Function) -> list[str]:
    """Return the names of the parameters; no one calls a `_` by name."""
    args = function.args
    every = (*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg)
    names = [arg.arg for arg in every if arg is not None]
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def described(docstring: str) -> set[str]:
    """Return the names that sections like `Args:` and `Args of methods:` describe."""
    sections = re.findall(r"(?ms)^Args(?: of \w+)?:\n(.*?)(?=^\S|\Z)", docstring)
    entries = re.findall(r"(?m)^    ([\w*][\w*, ]*)(?: \([^)]*\))?:", "\n".join(sections))
    return {name.strip(" *") for entry in entries for name in entry.split(",")}


def docstrings(function: Function, tree: ast.Module, around: tuple[ast.ClassDef, ...]) -> str:
    """Return what describes a function: its own docstring, its class's and its module's.

    A method that overrides one is described by the docstring of the one that it overrides, too.
    """
    found: list[ast.Module | ast.ClassDef | Function] = [function, tree, *around]
    waiting = list(around[-1:])
    while waiting:
        bases = [ast.unparse(base).partition("[")[0] for base in waiting.pop().bases]
        known = [CLASSES[name] for name in bases if name in CLASSES]
        waiting += known
        found += known
        found += [
            item for one in known for item in one.body if getattr(item, "name", "") == function.name
        ]  # type: ignore[misc]
    return "\n".join(ast.get_docstring(one) or "" for one in found)


def is_endpoint(function: Function) -> bool:
    """Whether /docs shows a function's docstring to users."""
    return any("router." in ast.unparse(item) for item in function.decorator_list)


def raised(function: Function) -> set[str]:
    """Return the names of the exceptions that a function's own lines raise."""
    inner = {
        id(node)
        for item in ast.walk(function)
        if isinstance(item, Function | ast.Lambda)
        for node in ast.walk(item)
        if item is not function
    }
    calls = [
        node.exc.func
        for node in ast.walk(function)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and id(node) not in inner
    ]
    names = [call.id for call in calls if isinstance(call, ast.Name)]
    return {name for name in names if name[0].isupper() and name != "AssertionError"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGES)))
def test_parameters_and_exceptions_are_described(file: Path) -> None:
    for function, around in public(TREES[file]):
        names = parameters(function)
        if len(names) <= 2 or is_endpoint(function):
            continue
        text = docstrings(function, TREES[file], around)
        assert [name for name in names if name not in described(text)] == [], function.name
        assert [name for name in raised(function) if name not in text] == [], function.name
