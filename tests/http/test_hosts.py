"""Names and origins: what DNS rebinding needs is refused, what people use is taken."""

import asyncio
import json
import logging
import socket

import httpx
import pytest

from specops.config import ConfigError, Settings
from specops.http.security.hosts import Hosts, host_name
from tests.http.connections import served
from tests.http.openai_api import CHAT, EMBEDDINGS, ENDPOINTS, MESSAGES, Api, api, events, problem

pytestmark = pytest.mark.anyio
EVIL = "rebind.example.com"
ANSWERED = {path: body for path, body in ENDPOINTS.items() if path != EMBEDDINGS}  # by the fake
CODESPACE = {
    "CODESPACE_NAME": "Shiny-Space-5g7",
    "GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN": "app.github.dev",
}
TAKEN = [
    *("127.0.0.1", "127.0.0.1:8000", "10.42.0.7:8000", "192.168.1.5", "0.0.0.0:8000", "8.8.8.8"),
    *("[::1]", "[::1]:8000", "[fd00::7]:8000", "[FE80::1]"),
    *("localhost", "LOCALHOST:8000", "localhost.", "app.localhost:3000", "api:8000", "gateway"),
    *("mybox.local", "host.docker.internal:8000", "pi.lan", "nas.home.arpa", ""),
    *("specops.llm.svc", "specops.llm.svc.cluster.local:80", "specops.llm.svc.cluster.local."),
    socket.gethostname(),
]
REFUSED = [
    *(EVIL, f"{EVIL}:8000", "REBIND.example.com.", "127.0.0.1.nip.io", "local.example.org"),
    *("localhost.example.org", "1.2.3", "300.1.1.1", "[::1", "[::1]x", "a.b:c"),
    *("svc.example", "notlocal.com", "evil.com:80:80", "[evil.com]"),
    "shiny-space-5g7-8000.app.github.dev",
]


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("Example.org.:8000", "example.org"),
        ("[::1]:8000", "::1"),
        (" localhost ", "localhost"),
        ("", ""),
        ("::1", None),
        ("a:b", None),
        ("[::1", None),
    ],
)
def test_a_hosts_name(header: str, name: str | None) -> None:
    assert host_name(header) == name


async def test_addresses_and_private_names_are_taken() -> None:
    async with api() as here:
        for host in TAKEN:
            answer = await here.client.get("/v1/models", headers={"host": host})
            assert answer.status_code == 200, host


@pytest.mark.parametrize("host", REFUSED)
async def test_public_names_are_refused_and_the_answer_says_what_to_set(host: str) -> None:
    async with api() as here:
        for path in ("/v1/models", "/", "/docs", "/openapi.json", "/console/figures", "/health/"):
            response = await here.client.get(path, headers={"host": host})
            error = problem(response, 403)
            assert error["code"] == "host_not_allowed"
            assert "SPECOPS_ALLOWED_HOSTS=" in error["message"]
            assert "SPECOPS_API_KEYS" in error["message"]
        for path, body in ENDPOINTS.items():
            response = await here.client.post(path, json=body, headers={"host": host})
            problem(response, 403)
        assert not here.service.requests
        assert here.rejected("unknown_host") == 6 + len(ENDPOINTS)


async def test_probes_and_scrapes_are_answered_under_any_name() -> None:
    """kubelet asks at the pod's address, an ingress under the public name."""
    async with api() as here:
        for host in (*TAKEN, *REFUSED):
            for path in ("/health", "/health/live", "/metrics"):
                answer = await here.client.get(path, headers={"host": host})
                assert answer.status_code == 200, (host, path)
        assert here.rejected("unknown_host") == 0


async def test_with_a_key_any_name_is_taken() -> None:
    async with api(api_keys="secret") as here:
        for host in (*TAKEN, *REFUSED):
            headers = {"host": host, "authorization": "Bearer secret"}
            answer = await here.client.get("/v1/models", headers=headers)
            assert answer.status_code == 200, host
            del headers["authorization"]
            answer = await here.client.get("/v1/models", headers=headers)
            assert answer.status_code == 401, host


@pytest.mark.parametrize(
    ("allowed", "host", "taken"),
    [
        ("*", EVIL, True),
        ("*", "[::1", True),
        ("*.example.org", "llm.example.org:443", True),
        ("*.example.org", "a.b.example.org", True),
        ("*.example.org", "example.org", False),
        ("*.example.org", "evilexample.org", False),
        (" LLM.example.org , specops.llm", "llm.example.org", True),
        (" LLM.example.org , specops.llm", "specops.llm", True),
        (" LLM.example.org , specops.llm", "a.specops.llm", False),
        (" LLM.example.org , specops.llm", EVIL, False),
    ],
)
async def test_a_setting_adds_names(allowed: str, host: str, taken: bool) -> None:
    settings = Settings.from_env({"SPECOPS_ALLOWED_HOSTS": allowed})
    async with api(allowed_hosts=settings.allowed_hosts) as here:
        status = (await here.client.get("/v1/models", headers={"host": host})).status_code
        assert status == (200 if taken else 403)


@pytest.mark.parametrize("text", ["https://a.org", "a.org:80", "a.*", "*a.org", "a b", "a,,b"])
def test_a_wrong_name_stops_the_start(text: str) -> None:
    with pytest.raises(ConfigError, match=r"SPECOPS_ALLOWED_HOSTS must be host names without port"):
        Settings.from_env({"SPECOPS_ALLOWED_HOSTS": text})


@pytest.mark.parametrize("text", ["a.org", "https://", "https://a.org/x", "https://a b", "https:"])
def test_a_wrong_origin_stops_the_start(text: str) -> None:
    with pytest.raises(ConfigError, match="SPECOPS_ALLOWED_ORIGINS must be origins"):
        Settings.from_env({"SPECOPS_ALLOWED_ORIGINS": text})


def test_a_codespace_answers_to_its_own_forwarded_names() -> None:
    hosts = Hosts("", CODESPACE)
    assert hosts.answers_to("shiny-space-5g7-8000.app.github.dev")
    assert hosts.answers_to("shiny-space-5g7-18000.app.github.dev:443")
    assert not hosts.answers_to("other-space-8000.app.github.dev")
    assert not hosts.answers_to("shiny-space-5g7-x-8000.app.github.dev")
    assert not hosts.answers_to("shiny-space-5g7-8000xapp.github.dev")
    for name in CODESPACE:
        empty = CODESPACE | {name: ""}
        assert not Hosts("", empty).answers_to("-8000.app.github.dev")


async def test_behind_a_codespaces_proxy_pages_of_the_service_itself_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The proxy keeps the public `Host` and makes the page's `Origin` the local one."""
    for name, value in CODESPACE.items():
        monkeypatch.setenv(name, value)
    headers = {"host": "shiny-space-5g7-8000.app.github.dev"}
    for scheme in ("http", "https"):
        async with api() as here:
            here.client.headers.update(headers | {"origin": f"{scheme}://localhost:8000"})
            for path, body in ANSWERED.items():
                assert (await here.client.post(path, json=body)).status_code == 200
            assert (await here.client.post("/api/show", json={"model": "fake"})).status_code == 200


async def test_each_refused_name_is_logged_once_and_only_so_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with api() as here:
        for number in range(200):
            for _ in range(3):
                headers = {"host": f"h{number}.example.com:8000"}
                await here.client.get("/v1/models", headers=headers)
        assert here.rejected("unknown_host") == 600
    names = [record.fields["host"] for record in caplog.records]  # type: ignore[attr-defined]
    assert names == [f"h{number}.example.com" for number in range(64)]


async def test_a_request_without_a_host_is_answered() -> None:
    async with served() as here:
        reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
        writer.write(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"200"
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: [\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"403"
        writer.close()


@pytest.mark.parametrize("path", ["/health/", "/v1/models/", "/docs/", "/metrics/", "//evil.com/"])
@pytest.mark.parametrize("host", [EVIL, "localhost"])
async def test_no_redirect_repeats_the_host(path: str, host: str) -> None:
    async with api(api_keys="key") as here:
        here.client.headers["authorization"] = "Bearer key"
        response = await here.client.get(f"http://test{path}", headers={"host": host})
        assert "location" not in response.headers
        assert response.status_code == 404


@pytest.mark.parametrize("key", ["", "key"])
@pytest.mark.parametrize(
    "host", ["a/v1/messages?", "a/api/", "\\", "a#", "a b", "evil.com@localhost"]
)
async def test_a_host_that_is_no_name_is_a_mistake(host: str, key: str) -> None:
    async with api(api_keys=key) as here:
        here.client.headers["authorization"] = f"Bearer {key}"
        for path, body in ENDPOINTS.items():
            answer = await here.client.post(path, json=body, headers={"host": host})
            assert answer.status_code == 400
            assert f"{host!r} is not a valid host name" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost:8000/v1/models?limit=5", EVIL, 200),
        ("HTTP://127.0.0.1/v1%2Fmodels", "localhost", 200),
        ("http://localhost", "localhost", 200),
        (f"http://{EVIL}/v1/models", "localhost", 403),
        ("http://a@localhost/v1/models", "localhost", 400),
        ("http:///v1/models", "localhost", 404),
        ("ftp://localhost/v1/models", "localhost", 404),
    ],
)
async def test_a_target_may_be_a_whole_url_whose_host_counts(
    target: str, host: str, status: int
) -> None:
    async with served() as here:
        client = await here.connect()
        client.writer.write(f"GET {target} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        assert (await client.reader.readline()).split()[1] == str(status).encode()
        client.writer.close()


# A path in the errors' form is the request's, whatever the host says.
@pytest.mark.parametrize("host", ["[", "a:b:c"])
async def test_a_strange_host_changes_no_answer(host: str) -> None:
    async with api(api_keys="key") as here:
        here.client.headers["authorization"] = "Bearer key"
        here.client.headers["x-request-id"] = "same"
        for path, body in ENDPOINTS.items():
            wrong = {**body, "temperature": "hot"}
            answers = [
                await here.client.post(path, json=wrong, headers={"host": name})
                for name in ("localhost", host)
            ]
            first, second = ((answer.status_code, answer.json()) for answer in answers)
            assert first == second


# -- origins -------------------------------------------------------------------------------------

LOCAL_PAGES = [
    *("http://localhost", "http://localhost:5173", "https://localhost:8443"),
    *("http://127.0.0.1:3000", "http://[::1]:3000", "http://0.0.0.0:3000"),
    *("http://app.localhost:4000", "app://obsidian.md"),
    *("tauri://localhost", "http://tauri.localhost"),
    *("vscode-webview://1a2b3c", "vscode-file://vscode-app", "file://"),
]
STRANGERS = [
    *("https://evil.example.com", "http://localhost.evil.com", "http://evil.com:5173", "null"),
    *("http://127.0.0.1.nip.io", "http://localhost:@evil.com", "https://chat.example.org"),
    *("chrome-extension://abc", "http://localhostx:3000", "xapp://a"),
]


def preflight(here: Api, origin: str, method: str = "POST", **more: str) -> httpx.Request:
    asked = "authorization,content-type,x-stainless-os"
    headers = {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": asked,
    }
    return here.client.build_request("OPTIONS", CHAT, headers=headers | more)


@pytest.mark.parametrize("key", ["", "secret"])
@pytest.mark.parametrize("origin", LOCAL_PAGES)
async def test_local_pages_may_call(origin: str, key: str) -> None:
    async with api(api_keys=key) as here:
        private = {"access-control-request-private-network": "true"}
        before = await here.client.send(preflight(here, origin, **private))
        assert before.status_code == 200
        assert before.headers["access-control-allow-origin"] == origin
        assert "authorization" in before.headers["access-control-allow-headers"]
        assert before.headers["access-control-allow-private-network"] == "true"
        sent = {"origin": origin} | ({"authorization": f"Bearer {key}"} if key else {})
        for path, body in ANSWERED.items():
            answer = await here.client.post(path, json=body, headers=sent)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == origin
            assert "Origin" in answer.headers["vary"]
            exposed = answer.headers["access-control-expose-headers"].split(", ")
            assert {"x-request-id", "retry-after"} <= set(exposed)
        stream = await here.client.post(CHAT, json=ENDPOINTS[CHAT] | {"stream": True}, headers=sent)
        assert stream.headers["access-control-allow-origin"] == origin
        assert events(stream)[-1] == "DONE"


@pytest.mark.parametrize("origin", STRANGERS)
async def test_pages_of_strangers_may_not_read(origin: str) -> None:
    async with api() as here:
        before = await here.client.send(preflight(here, origin))
        assert before.status_code == 200  # for clients that take another for a dead server
        assert "access-control-allow-origin" not in before.headers
        answer = await here.client.get("/v1/models", headers={"origin": origin})
        assert "access-control-allow-origin" not in answer.headers
        # Without a preflight a page can only send other types, which are not taken.
        for path, body in {**ENDPOINTS, "/api/show": {"model": "fake"}}.items():
            headers = {"origin": origin, "content-type": "text/plain"}
            sent = await here.client.post(path, content=json.dumps(body), headers=headers)
            assert sent.status_code == 415
        assert not here.service.requests


@pytest.mark.parametrize(
    ("allowed", "origin", "taken"),
    [
        ("https://chat.example.org", "https://chat.example.org", True),
        ("https://chat.example.org", "http://chat.example.org", False),
        ("https://*.example.org", "https://a.b.example.org", True),
        ("https://*.example.org", "https://example.org.evil.com", False),
        ("chrome-extension://*, https://a.org:*", "chrome-extension://abc", True),
        ("chrome-extension://*, https://a.org:*", "https://a.org:8443", True),
        ("*", "https://evil.example.com", True),
    ],
)
async def test_a_setting_adds_origins(allowed: str, origin: str, taken: bool) -> None:
    settings = Settings.from_env({"SPECOPS_ALLOWED_ORIGINS": allowed})
    async with api(allowed_origins=settings.allowed_origins) as here:
        before = await here.client.send(preflight(here, origin))
        assert before.status_code == 200
        assert before.headers.get("access-control-allow-origin") == (origin if taken else None)


async def test_errors_can_be_read_by_a_page_that_may_call() -> None:
    async with api(api_keys="secret") as here:
        origin = "http://localhost:5173"
        answer = await here.client.post(MESSAGES, json={}, headers={"origin": origin})
        assert answer.status_code == 401
        assert answer.headers["access-control-allow-origin"] == origin
