"""The server under test reads the benchmark's settings, and says why it does not start."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.serving.load import ServerError
from bench.serving.server import environment, serving
from specops.config import Settings

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


@pytest.mark.e2e
def test_a_server_that_does_not_start_says_why() -> None:
    settings = {"SPECOPS_MODEL": "no-such-preset"}
    with pytest.raises(ServerError, match="no-such-preset"), serving(settings):
        pass
