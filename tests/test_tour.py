"""docs/tour.md follows the code: its steps name files and functions that exist, 600 lines in all.

In the page every `code` is either a path of the repository or a name that one of the paths of the
same step defines: `Class`, `function` or `Class.method`.
"""

import inspect
import re
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
BEGINNING, *STEPS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
FIRST_LINE = re.compile(r"`([\w.]+)` in `(api/specops/[\w/]+\.py)`")


def module_of(path: str) -> object:
    """The module in a file of the package."""
    name = Path(path).relative_to("api").with_suffix("").as_posix().replace("/", ".")
    return import_module(name)


def unknown(text: str) -> list[str]:
    """The code of a step that is neither a path nor a name that one of its paths defines."""
    code = re.findall(r"`([^`]+)`", text)
    paths = [item for item in code if "/" in item]
    missing = [path for path in paths if not (ROOT / path).is_file()]
    modules = [module_of(path) for path in paths if path.startswith("api/") and path not in missing]
    return missing + [
        name
        for name in code
        if "/" not in name and not any(defines(module, name) for module in modules)
    ]


def defines(module: object, name: str) -> bool:
    """Whether a module defines, and does not only import, `Name` or `Name.attribute`."""
    try:
        first = getattr(module, name.partition(".")[0])
        reduce(getattr, name.split("."), module)
    except AttributeError:
        return False
    return getattr(first, "__module__", None) == getattr(module, "__name__", "")


def test_there_are_twelve_steps_in_order() -> None:
    assert [step.split(".")[0] for step in STEPS] == [str(number) for number in range(1, 13)]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.partition("\n")[0])
def test_a_step_names_what_is_there(step: str) -> None:
    _, _, first, *_ = step.splitlines()
    assert FIRST_LINE.fullmatch(first), first
    assert unknown(step) == []


def test_the_beginning_names_what_is_there() -> None:
    assert unknown(BEGINNING) == []


def test_a_newcomer_reads_it_in_half_an_hour() -> None:
    """The functions that the page names, with their docstrings, are at most 600 lines."""
    named: dict[str, int] = {}
    for step in STEPS:
        code = re.findall(r"`([^`]+)`", step)
        modules = [module_of(item) for item in code if item.endswith(".py")]
        for name in code:
            if "/" not in name:
                (module,) = {module for module in modules if defines(module, name)}
                source = inspect.getsource(reduce(getattr, name.split("."), module))  # type: ignore[arg-type]
                named[name] = len(source.splitlines())
    assert len(named) > 20
    assert sum(named.values()) <= 600, named


@pytest.mark.parametrize(
    "text",
    [
        "`api/specops/engine/gone.py`",
        "`Scheduler.stride` in `api/specops/engine/scheduler.py`",
        "`Planner` in `api/specops/engine/scheduler.py`",  # only imported there
        "`Scheduler.step` in no file",
    ],
)
def test_a_missing_name_is_reported(text: str) -> None:
    assert len(unknown(text)) == 1
