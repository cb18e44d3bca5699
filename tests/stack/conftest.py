"""What several tests share: a browser, a running console, and the load test's modules."""

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.browser import BrowserError, launched
from tests.kinds import running
from tests.stack.console import console
from tests.stack.support import ROOT


@pytest.fixture(scope="package")
def console_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running API on the default model."""
    with running(tmp_path_factory.mktemp("console")) as url:
        yield url


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """A browser. Playwright's event loop runs as long: packages with it have no async tests."""
    try:
        with launched() as started:
            yield started
    except BrowserError as missing:
        pytest.skip(f"NOTHING WAS TESTED IN A BROWSER: {missing}")


@pytest.fixture
def page(browser: Any, console_url: str) -> Iterator[Any]:
    """The console on a desktop screen."""
    with console(browser, console_url, viewport={"width": 1280, "height": 1000}) as opened:
        yield opened


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The load test's own modules; they import each other without a package, as Locust does."""
    monkeypatch.syspath_prepend(str(ROOT / "loadtest"))
    names = ("access", "options", "prefill", "protocols", "record", "shapes", "slo", "summary")
    names += ("texts", "traces", "workload")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})
