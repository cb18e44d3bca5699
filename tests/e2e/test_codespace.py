"""The real Grafana behind a Codespace's proxy: signing in, a query, saving, the live channel.

Its image has to be pulled for that; tests/stack/test_codespace.py has the rules as a model.
"""

import base64
import re
import secrets
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.stack import GRAFANA_PASSWORD, Stack
from tests.stack.forwarding import Forwarded, forwarded
from tests.waiting import PATIENCE

pytestmark = pytest.mark.e2e


@pytest.fixture
def grafana(stack: Stack, tmp_path: Path) -> Iterator[Forwarded]:
    if "grafana" not in stack.services:
        pytest.skip("GRAFANA WAS NOT TESTED: its image cannot be pulled here")
    with forwarded(int(stack.env["GRAFANA_PORT"]), tmp_path) as way:
        yield way


@pytest.fixture
def signed_in(grafana: Forwarded) -> Iterator[httpx.Client]:
    """A client that sends what a browser on Grafana's own page sends, after its sign-in."""
    with httpx.Client(
        base_url=f"https://127.0.0.1:{grafana.entrance}",
        headers={"Host": grafana.host, "Origin": grafana.url},
        verify=False,  # noqa: S501 - the proxy's own certificate
        timeout=PATIENCE,
    ) as client:
        answer = client.post("/login", json={"user": "admin", "password": GRAFANA_PASSWORD})
        assert answer.status_code == 200, answer.text
        assert "grafana_session" in client.cookies
        yield client


QUERY = {
    "queries": [{"refId": "A", "datasource": {"uid": "prometheus"}, "expr": "6 * 7"}],
    "from": "now-5m",
    "to": "now",
}


def test_somebody_signed_in_sees_figures_and_saves_a_dashboard(signed_in: httpx.Client) -> None:
    answer = signed_in.post("/api/ds/query", json=QUERY)
    assert answer.status_code == 200, answer.text
    assert 42 in answer.json()["results"]["A"]["frames"][0]["data"]["values"][1]
    copy = {"dashboard": {"title": "A copy", "panels": []}, "overwrite": False}
    saved = signed_in.post("/api/dashboards/db", json=copy)
    assert saved.status_code == 200, saved.text
    found = signed_in.get(f"/api/dashboards/uid/{saved.json()['uid']}")
    assert found.json()["dashboard"]["title"] == "A copy"


def test_another_sites_page_is_refused(signed_in: httpx.Client) -> None:
    answer = signed_in.post("/api/ds/query", json=QUERY, headers={"Origin": "https://example.com"})
    assert answer.status_code == 403
    assert "origin not allowed" in answer.text


@pytest.mark.parametrize(("own", "status"), [(True, 101), (False, 403)])
def test_the_live_channel_opens_for_grafanas_own_page(
    grafana: Forwarded, signed_in: httpx.Client, own: bool, status: int
) -> None:
    cookies = "; ".join(f"{name}={value}" for name, value in signed_in.cookies.items())
    head = [
        "GET /api/live/ws HTTP/1.1",
        f"Host: {grafana.host}",
        f"Origin: {grafana.url if own else 'https://example.com'}",
        f"Cookie: {cookies}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {base64.b64encode(secrets.token_bytes(16)).decode()}",
    ]
    context = ssl._create_unverified_context()  # noqa: S323 - the proxy's own certificate
    with (
        socket.create_connection(("127.0.0.1", grafana.entrance), PATIENCE) as plain,
        context.wrap_socket(plain) as connection,
    ):
        connection.sendall("\r\n".join([*head, "", ""]).encode())
        answer = connection.recv(4096).decode()
    assert re.match(rf"HTTP/1\.1 {status} ", answer), answer


def test_the_pages_name_the_codespaces_own_address(
    grafana: Forwarded, signed_in: httpx.Client
) -> None:
    settings = signed_in.get("/api/frontend/settings").json()
    assert settings["appUrl"] == f"{grafana.url}/"
