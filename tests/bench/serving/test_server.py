"""The server under test reads the benchmark's settings, and its client tells failures."""

from __future__ import annotations

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


def test_requests_share_a_connection_and_a_refusal_is_an_error_with_the_servers_words() -> None:
    seen = set()

    class Answers(Handler):
        def do_POST(self) -> None:
            seen.add(self.client_address)
            self.reply(*((200, b'{"a": 1}') if self.body() else (429, b"try again")))

    with listening(Answers) as port:
        client = Client(port)
        assert client.generate({"prompt": ""}) == client.generate({"prompt": ""}) == {"a": 1}
        assert len(seen) == 1
        with pytest.raises(ServerError, match="429: try again"):
            client.generate({})
        client.close()
