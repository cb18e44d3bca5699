"""The stack's pages behind a Codespace's forwarding proxy, in a real browser.

Grafana is only to be had as an image: tests/e2e/test_codespace.py asks it whether it takes a
browser's requests behind the proxy, where that image can be pulled.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.browser import BrowserError, launched
from tests.loopback import HOST, free_port
from tests.overload import serving
from tests.stack.console import console, converse, opened, option, until
from tests.stack.forwarding import DOMAIN, ENVIRONMENT, NAME, Forwarded, forwarded, resolver_rules
from tests.stack.support import ROOT, tool
from tests.stack.test_compose_file import resolved
from tests.waiting import answers, started

pytestmark = pytest.mark.e2e


@contextmanager
def browsing(*ports: Forwarded) -> Iterator[Any]:
    """A browser in which the public names lead to the proxies."""
    try:
        with launched(resolver_rules(*ports)) as browser:
            yield browser
    except BrowserError as missing:
        pytest.skip(f"NOTHING WAS TESTED IN A BROWSER: {missing}")


def test_only_the_origin_that_is_the_forwarded_address_is_replaced() -> None:
    way = Forwarded(3000, 0, "http://localhost:3000")

    def seen(origin: str) -> str:
        head = f"POST / HTTP/1.1\r\nHost: {way.host}\r\nOrigin: {origin}\r\n\r\n"
        return way.rewritten(head.encode()).decode()

    assert f"Host: {NAME}-3000.app.github.dev\r\n" in seen(way.url)
    assert f"X-Forwarded-Host: {NAME}-3000.app.github.dev\r\n" in seen(way.url)
    assert "Origin: http://localhost:3000\r\n" in seen(way.url)
    assert "Origin: https://example.com\r\n" in seen("https://example.com")


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a service of the default model in a Codespace."""
    folder = tmp_path_factory.mktemp("codespace")
    with serving(folder, SPECOPS_MODEL="", **ENVIRONMENT) as (port, _):
        yield port


def test_the_console_chats(api: int, tmp_path: Path) -> None:
    with (
        forwarded(api, tmp_path) as way,
        browsing(way) as browser,
        console(browser, way.url, ignore_https_errors=True) as page,
    ):
        option(page, "Longest answer", "8")
        converse(page, "def __enter__(self):")
        assert "8 tokens" in page.locator("#turns li.assistant .hint").inner_text()


def test_locusts_page_runs_a_test(api: int, tmp_path: Path) -> None:
    if tool("locust") is None:
        pytest.skip("no Locust here")
    port = free_port()
    command = [tool("locust"), "-f", ROOT / "loadtest" / "locustfile.py"]
    command += ["--web-host", HOST, "--web-port", port, "--host", f"http://{HOST}:{api}"]
    log, env = tmp_path / "locust.log", {**os.environ, **ENVIRONMENT}
    with (
        started(command, log, lambda: answers(f"http://{HOST}:{port}/"), env=env, cwd=tmp_path),
        forwarded(port, tmp_path) as way,
        browsing(way) as browser,
        opened(browser, way.url, ignore_https_errors=True) as (page, _),
    ):
        page.get_by_role("button", name="Start").click()
        until(
            page,
            """fetch("/stats/requests").then((answer) => answer.json())
            .then(({stats}) => stats.some((row) => row.num_requests > 0))""",
        )


def grafana_settings(tmp_path: Path, **variables: str) -> dict[str, str]:
    lines = "".join(f"{name}={value}\n" for name, value in variables.items())
    found: dict[str, str] = resolved(tmp_path, lines)["services"]["grafana"]["environment"]
    return {name: value or "" for name, value in found.items()}


def test_links_that_grafana_writes_lead_to_the_codespace(tmp_path: Path) -> None:
    names = ("GF_SERVER_ROOT_URL", "GF_SECURITY_CSRF_TRUSTED_ORIGINS", "GF_LIVE_ALLOWED_ORIGINS")
    inside = grafana_settings(tmp_path, CODESPACE_NAME=NAME)
    assert inside["GF_SERVER_ROOT_URL"] == f"https://{NAME}-3000.{DOMAIN}/"
    moved = grafana_settings(
        tmp_path,
        GRAFANA_PORT="3100",
        **{**ENVIRONMENT, "GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN": "example.dev"},
    )
    assert moved["GF_SERVER_ROOT_URL"] == f"https://{NAME}-3100.example.dev/"
    assert moved["GF_SECURITY_CSRF_TRUSTED_ORIGINS"] == "localhost"  # what the proxy makes of it
    origins = {f"{scheme}://localhost:3100" for scheme in ("http", "https")}
    assert set(moved["GF_LIVE_ALLOWED_ORIGINS"].split(",")) == origins
    outside = grafana_settings(tmp_path, CODESPACE_NAME="")
    assert {outside[name] for name in names} == {""}  # which Grafana takes for not set
