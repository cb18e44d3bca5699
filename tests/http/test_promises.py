"""Promises of SECURITY.md that belong to no endpoint: what clients name is not followed or run."""

import ast
import hmac
import json
import logging
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specops.synonyms import PATHS
from specops.system import logs
from tests.fakes import FakeService
from tests.http.openai_api import ANSWER, CHAT, EMBEDDINGS, ENDPOINTS, MESSAGES, RESPONSES, api

pytestmark = pytest.mark.anyio
API = Path(__file__).resolve().parents[2] / "api" / "specops"
EVENTS = ("open", "socket.connect", "subprocess.Popen", "os.system", "exec", "import")
_watched: list[tuple[str, str]] | None = None  # None: no test looks
_hooked = False


@pytest.fixture
def touched() -> Iterator[list[tuple[str, str]]]:
    """Files opened, programs started and addresses called while the test runs."""
    # An audit hook cannot be removed.
    global _hooked, _watched  # noqa: PLW0603

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if _watched is not None and event in (
            "open",
            "socket.connect",
            "subprocess.Popen",
            "os.system",
            "exec",
            "import",
        ):
            _watched.append((event, str(arguments)))

    if not _hooked:
        sys.addaudithook(note)
        _hooked = True
    _watched = []
    yield _watched
    _watched = None


def parts(url: str) -> list[tuple[str, dict[str, Any]]]:
    """Requests of all protocols with a part that names something to fetch."""
    image = {"type": "image_url", "image_url": {"url": url}}
    source = {"type": "image", "source": {"type": "url", "url": url}}
    file = {"type": "input_file", "file_url": url}
    return [
        (CHAT, {"messages": [{"role": "user", "content": [image]}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "file", "file": url}]}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [source]}]}),
        (RESPONSES, {"input": [{"role": "user", "content": [file]}]}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": [url]}]}),
        ("/api/generate", {"prompt": "a", "images": [url]}),
        ("/api/show", {"model": url}),
    ]


async def test_no_file_that_a_client_names_is_opened_and_no_address_is_called(
    tmp_path: Path, touched: list[tuple[str, str]]
) -> None:
    secret = tmp_path / "a-file-that-a-client-names"
    secret.write_text("a secret", "utf-8")
    touched.clear()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        named = (
            *(str(secret), f"file://{secret}", f"../../../../../..{secret}", f"@{secret}"),
            *(f"http://127.0.0.1:{port}/x", f"//127.0.0.1:{port}/x", f"\\\\127.0.0.1@{port}\\x"),
        )
        async with api() as here:
            for text in named:
                for path, body in ENDPOINTS.items():
                    if path == EMBEDDINGS:
                        continue
                    for name in ("model", "user", "stop", "lora", "template", "prompt"):
                        await here.client.post(path, json=body | {name: text})
                for path, body in parts(text):
                    given = {"model": "fake", "max_tokens": 4} | body
                    answer = await here.client.post(path, json=given)
                    assert answer.status_code < 500
                    assert "a secret" not in answer.text
                await here.client.get(f"/v1/models/{text}")
                await here.client.get("/docs/..%2f..%2f" + text.replace("/", "%2f"))
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert touched  # something is opened all the time
    assert not [entry for entry in touched if secret.name in entry[1] or f" {port})" in entry[1]]


async def test_no_code_that_a_client_sends_is_run(touched: list[tuple[str, str]]) -> None:
    witness = "code_of_a_client"
    codes = (
        "{{ cycler.__init__.__globals__.os.system('" + witness + "') }}{{ 7 * 191 }}",
        f"__import__('os').system('{witness}')",
        f"$({witness})`{witness}`",
        f"!!python/object/apply:os.system ['{witness}']",
    )
    service = FakeService(ANSWER)
    async with api(service) as here:
        for code in codes:
            for path, body in ENDPOINTS.items():
                if path != EMBEDDINGS:
                    text = json.loads(json.dumps(body).replace("abc", json.dumps(code)[1:-1]))
                    assert (await here.client.post(path, json=text)).status_code == 200
    prompts = [service.loaded.tokenizer.decode(item.prompt_tokens) for item in service.requests]
    assert all(any(code in prompt for prompt in prompts) for code in codes)
    assert not any("1337" in prompt for prompt in prompts)
    events = ("os.system", "subprocess.Popen", "exec")
    assert not [entry for entry in touched if entry[0] in events and witness in entry[1]]


async def test_no_other_path_is_open() -> None:
    as_json = {"accept": "application/json"}
    async with api(api_keys="secret") as here:
        pages = {"/", "/docs", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css"}
        pages |= {"/openapi.json"}
        paths = {
            *here.app.openapi()["paths"],
            *(await here.client.get("/", headers=as_json)).json()["links"].values(),
        }
        paths |= pages | {"/console/figures", "/nothing", "/docs/nothing", "/healthy", "/health/x"}
        paths |= PATHS.keys()  # other servers' names
        open_ones = set()
        for path in paths:
            answer = await here.client.get(path.replace("{model}", "fake"))
            if answer.status_code != 401:
                open_ones.add(path)
    assert open_ones == {"/health", "/v1/health", "/health/live", "/metrics", *pages}


async def test_every_key_is_compared_and_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def noted(first: bytes, second: bytes) -> bool:
        compared.append((len(first), len(second)))
        return compare(first, second)

    monkeypatch.setattr(hmac, "compare_digest", noted)
    counts = set()
    async with api(api_keys="first,second-is-longer") as here:
        for key in ("first", "second-is-longer", "f", "x" * 5000, ""):
            compared.clear()
            await here.client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert set(compared) == {(32, 32)}
            counts.add(len(compared))
    assert len(counts) == 1


async def test_no_key_is_in_a_log_line_or_a_metric(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    keys = ("a-secret-key", "alice:another-secret")
    async with api(api_keys=",".join(keys), metrics_key="third-secret") as here:
        for key in ("a-secret-key", "another-secret", "wrong-secret"):
            for path in (CHAT, "/nothing"):
                headers = {"authorization": f"Bearer {key}", "x-load-test": "smoke"}
                await here.client.post(path, json=ENDPOINTS[CHAT], headers=headers)
        page = here.metrics.expose()[0].decode()
    lines = [logs.JsonFormatter().format(record) for record in caplog.records]
    assert lines
    assert not [text for text in (page, *lines) if "secret" in text]


def test_no_code_of_a_models_folder_is_trusted() -> None:
    given = [
        keyword.value
        for text in (path.read_text("utf-8") for path in API.rglob("*.py"))
        if "trust_remote_code" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "trust_remote_code"
    ]
    assert given
    assert all(isinstance(value, ast.Constant) and value.value is False for value in given)
