"""A browser and a console to open in it, for the tests that drive it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from scripts.browser import BrowserError, launched
from tests.overload import HOST, serving
from tests.stack.console import console


@pytest.fixture(scope="module")
def console_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running API on the demo pair."""
    with serving(tmp_path_factory.mktemp("console")) as (port, _):
        yield f"http://{HOST}:{port}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        with launched() as started:
            yield started
    except BrowserError as missing:
        pytest.skip(f"THE CONSOLE WAS NOT TESTED IN A BROWSER: {missing}")


@pytest.fixture
def page(browser: Any, console_url: str) -> Iterator[Any]:
    """The console on a desk."""
    with console(browser, console_url, viewport={"width": 1280, "height": 1000}) as opened:
        yield opened
