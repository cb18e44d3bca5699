"""The server under test reads the settings that the benchmark runs the engine with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bench.serving.server import Client, ServerError, environment, serving
from specops.config import Settings

BARE = Settings.from_env({})
SETTINGS = [
    BARE,
    Settings(target="/models/a", draft="none", slots=1, context=512, threads=2),
    replace(BARE, kv_dtype="int8", log_prompts=True, drain_timeout=2.5, cache_dir=Path("/var/x")),
    replace(Settings.from_env({"SPECOPS_MODEL": "phi3"}), slots=2, drafter="ngram"),
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_survive_the_way_through_the_environment(settings: Settings) -> None:
    assert Settings.from_env(environment(settings)) == settings


def test_a_setting_at_its_default_is_not_passed_on() -> None:
    assert environment(BARE) == {"SPECOPS_MODEL": "demo"}


def test_a_server_that_does_not_start_says_why() -> None:
    settings = Settings(model="no-such-preset")
    with pytest.raises(ServerError, match="no-such-preset"), serving(settings):
        pass


@contextmanager
def answering(
    status: int, body: bytes, connections: set[tuple[str, int]] | None = None
) -> Iterator[Client]:
    """A client of a server that is healthy and answers every POST the same.

    The addresses that requests come from are added to `connections`.
    """
    seen = set() if connections is None else connections

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            seen.add(self.client_address)
            self.answer(200, b'{"error": null}')

        def do_POST(self) -> None:
            seen.add(self.client_address)
            self.rfile.read(int(self.headers["content-length"]))
            self.answer(status, body)

        def answer(self, code: int, content: bytes) -> None:
            self.send_response(code)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            """Keep the test's output clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        client = Client(server.server_port)
        try:
            yield client
        finally:
            client.close()
            server.shutdown()
            thread.join()


def test_a_plain_answer_is_its_json() -> None:
    with answering(200, b'{"generated_text": "x"}') as client:
        assert client.generate({"prompt": ""}) == {"generated_text": "x"}


def test_requests_share_a_connection() -> None:
    connections: set[tuple[str, int]] = set()
    with answering(200, b"{}", connections) as client:
        client.generate({})
        client.generate({})
    assert len(connections) == 1


def test_a_refusal_is_an_error_with_the_servers_words() -> None:
    with answering(429, b"try again") as client, pytest.raises(ServerError, match="429: try again"):
        client.generate({"prompt": ""})
