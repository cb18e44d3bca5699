"""The stack's pages behind a Codespace's forwarding proxy, in a real browser.

Grafana is only to be had as an image. Its rules for origins stand below as a model of its source,
applied to what a browser's requests look like behind the proxy; tests/e2e/test_codespace.py asks
the real one where that image can be pulled.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest

from scripts.browser import BrowserError, launched
from tests.loopback import HOST, Handler, free_port, listening
from tests.overload import serving
from tests.stack.console import console, finish, open_chat, option, say, until
from tests.stack.forwarding import DOMAIN, ENVIRONMENT, NAME, Forwarded, forwarded, resolver_rules
from tests.stack.support import ROOT, tool
from tests.stack.test_compose_file import resolved
from tests.waiting import answers, wait

pytestmark = pytest.mark.e2e
SIGNED_IN = "grafana_session=abc"


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


def test_the_console_chats(tmp_path: Path) -> None:
    with (
        serving(tmp_path, **ENVIRONMENT) as (port, _),
        forwarded(port, tmp_path) as way,
        browsing(way) as browser,
        console(browser, way.url, ignore_https_errors=True) as page,
    ):
        open_chat(page)
        option(page, "Longest answer", "8")
        say(page, "def __enter__(self):")
        finish(page)
        assert "8 tokens" in page.locator("#turns li.assistant .hint").inner_text()


def test_locusts_page_runs_a_test(tmp_path: Path) -> None:
    if tool("locust") is None:
        pytest.skip("no Locust here")
    port = free_port()
    with serving(tmp_path, **ENVIRONMENT) as (api, _), (tmp_path / "locust.log").open("wb") as log:
        command = [tool("locust"), "-f", ROOT / "loadtest" / "locustfile.py"]
        command += ["--web-host", HOST, "--web-port", port, "--host", f"http://{HOST}:{api}"]
        with subprocess.Popen(list(map(str, command)), stderr=log, cwd=tmp_path) as process:
            try:
                wait("Locust's page", lambda: answers(f"http://{HOST}:{port}/"))
                with forwarded(port, tmp_path) as way, browsing(way) as browser:
                    page = browser.new_context(ignore_https_errors=True).new_page()
                    page.goto(way.url)
                    page.get_by_role("button", name="Start").click()
                    until(
                        page,
                        """fetch("/stats/requests").then((answer) => answer.json())
                        .then(({stats}) => stats.some((row) => row.num_requests > 0))""",
                    )
            finally:
                process.terminate()


# -- Grafana -------------------------------------------------------------------------------------


def csrf_accepts(method: str, headers: Mapping[str, str], settings: Mapping[str, str]) -> bool:
    """Grafana's pkg/middleware/csrf/csrf.go, `check`; header names in lower case."""
    if "grafana_session=" not in headers.get("cookie", ""):
        return True
    if method in {"HEAD", "OPTIONS", "TRACE"} or not headers.get("origin"):
        return True
    origin = urlsplit(headers["origin"]).hostname
    trusted = settings["GF_SECURITY_CSRF_TRUSTED_ORIGINS"].split()
    return origin in trusted or origin == headers["host"].partition(":")[0]


def live_accepts(headers: Mapping[str, str], settings: Mapping[str, str]) -> bool:
    """Grafana's pkg/services/live/live.go, `getCheckOriginFunc` and `checkAllowedOrigin`."""
    origin = headers.get("origin", "").lower()
    if not origin or urlsplit(origin).netloc == headers["host"].lower():
        return True
    root, asked = urlsplit(settings["GF_SERVER_ROOT_URL"]), urlsplit(origin)
    own = root.netloc if asked.port else root.hostname
    if (asked.scheme, asked.netloc) == (root.scheme, own):
        return True
    patterns = settings["GF_LIVE_ALLOWED_ORIGINS"].split(",")
    return any(fnmatchcase(origin, pattern.strip()) for pattern in patterns)


class Recorder(Handler):
    """Stands where Grafana would: takes a sign-in, a query and a WebSocket, and records them."""

    seen: ClassVar[list[tuple[str, str, dict[str, str]]]]

    def do_GET(self) -> None:
        self.record()
        if key := self.headers.get("Sec-WebSocket-Key"):
            magic = f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
            accept = base64.b64encode(hashlib.sha1(magic.encode()).digest()).decode()  # noqa: S324
            self.send_response(101)
            for name, value in (
                ("Upgrade", "websocket"),
                ("Connection", "Upgrade"),
                ("Sec-WebSocket-Accept", accept),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.close_connection = True
        else:
            self.reply(200, b"<!doctype html>", {"Set-Cookie": f"{SIGNED_IN}; SameSite=Lax"})

    def do_POST(self) -> None:
        self.body()
        self.record()
        self.reply(200, {})

    def record(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.seen.append((self.command, self.path, headers))


def grafana_settings(tmp_path: Path, **variables: str) -> dict[str, str]:
    lines = "".join(f"{name}={value}\n" for name, value in variables.items())
    found: dict[str, str] = resolved(tmp_path, lines)["services"]["grafana"]["environment"]
    return {name: value or "" for name, value in found.items()}


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_grafana_takes_queries_and_its_live_channel_from_somebody_signed_in(
    scheme: str, tmp_path: Path
) -> None:
    class Grafana(Recorder):
        seen: ClassVar = []

    with (
        listening(Grafana) as port,
        forwarded(port, tmp_path, scheme) as way,
        browsing(way) as browser,
    ):
        page = browser.new_context(ignore_https_errors=True).new_page()
        page.goto(way.url)
        page.evaluate("""async () => {
            await fetch("/api/ds/query", {method: "POST", body: "{}"});
            await new Promise((resolve) => {
                const socket = new WebSocket(`wss://${location.host}/api/live/ws`);
                socket.onopen = socket.onerror = resolve;
            });
        }""")
    seen = {path: (method, headers) for method, path, headers in Grafana.seen}
    method, query = seen["/api/ds/query"]
    _, live = seen["/api/live/ws"]
    assert query["cookie"] == SIGNED_IN
    assert query["host"] == live["host"] == way.host
    assert query["origin"] == live["origin"] == f"{scheme}://localhost:{port}"

    settings = grafana_settings(tmp_path, GRAFANA_PORT=str(port), **ENVIRONMENT)
    assert csrf_accepts(method, query, settings)
    assert live_accepts(live, settings)
    for headers in (query, live):  # of another site, through the proxy
        elsewhere = {**headers, "origin": "https://example.com"}
        assert not csrf_accepts("POST", elsewhere, settings)
        assert not live_accepts(elsewhere, settings)

    plain = grafana_settings(tmp_path, GRAFANA_PORT=str(port), CODESPACE_NAME="")
    assert not csrf_accepts(method, query, plain)
    assert not live_accepts(live, plain)


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
    outside = grafana_settings(tmp_path, CODESPACE_NAME="")
    assert {outside[name] for name in names} == {""}  # which Grafana takes for not set
