"""One stack for all tests of containers, and lines about it in the summary."""

from collections.abc import Callable, Iterator

import pytest

from tests.e2e.engine import running_engine
from tests.e2e.stack import Stack, running_stack
from tests.stack.conftest import browser

__all__ = ["browser"]  # one for this package

Note = Callable[[str], None]


@pytest.fixture(scope="session")
def note(summary_lines: dict[str, list[str]]) -> Note:
    """Add a line to the summary, whether tests pass or fail."""
    return summary_lines.setdefault("the stack on a Docker Engine", []).append


@pytest.fixture(scope="package")
def started(
    tmp_path_factory: pytest.TempPathFactory, note: Callable[[str], None]
) -> Iterator[Stack]:
    """The stack on an engine; ended and removed after the last test."""
    with running_engine() as engine:
        version = "{{.ServerVersion}}, {{.Driver}}, cgroup v{{.CgroupVersion}}, {{.NCPU}} CPUs"
        note(f"engine: {engine.info(version)}, {'found' if not engine.address else 'started here'}")
        with running_stack(engine, tmp_path_factory.mktemp("e2e")) as stack:
            note(f"services: {', '.join(stack.services)}")
            if "grafana" not in stack.services:
                note("GRAFANA WAS NOT TESTED: its image cannot be pulled here")
            yield stack


@pytest.fixture
def stack(started: Stack) -> Stack:
    """The stack, healthy again after the test before."""
    started.up()
    return started
