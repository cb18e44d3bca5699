"""A browser and a console to open in it, for the tests that drive it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from scripts.browser import BrowserError, launched
from tests.loopback import free_port
from tests.stack.console import console
from tests.stack.support import ROOT

START_SECONDS = 120.0


@pytest.fixture(scope="module")
def console_url() -> Iterator[str]:
    """A running API on the demo pair."""
    port = str(free_port())
    process = subprocess.Popen(
        [sys.executable, "-m", "specops", "serve"],
        cwd=ROOT,
        env={**os.environ, "SPECOPS_PORT": port, "SPECOPS_MODEL": "demo"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _ready(address):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def _ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.HTTPError:
        return False


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
