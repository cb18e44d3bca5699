"""The server under test reads the settings that the benchmark runs the engine with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bench.serving.server import Client, ServerError, environment, serving
from specops.config import Settings
from tests.loopback import Handler, listening

BARE = Settings.from_env({"SPECOPS_MODEL": "demo"})
SETTINGS = [
    BARE,
    Settings(target="/models/a", draft="none", slots=1, context=512, threads=2),
    replace(
        BARE, kv_dtype="int8", unknown_fields="refuse", drain_timeout=2.5, cache_dir=Path("/var/x")
    ),
    replace(Settings.from_env({"SPECOPS_MODEL": "phi3"}), slots=2, drafter="suffix"),
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_survive_the_way_through_the_environment(settings: Settings) -> None:
    assert Settings.from_env(environment(settings)) == settings


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

    class Answers(Handler):
        def do_POST(self) -> None:
            seen.add(self.client_address)
            self.body()
            self.reply(status, body)

    with listening(Answers) as port:
        client = Client(port)
        try:
            yield client
        finally:
            client.close()


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
