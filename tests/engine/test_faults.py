"""A request in which something goes wrong fails alone, wherever that is."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from specops.config import Settings
from specops.engine.engine import Engine
from specops.request import FinishReason
from specops.system.logs import JsonFormatter
from tests.conftest import THREADS
from tests.faults import ALL, faults, faulty, play
from tests.leavers import heldout, kinds

SETTINGS = Settings(model="demo", threads=THREADS, slots=5, kv_tokens=1024, max_batched_tokens=32)
PROMPTS = heldout(SETTINGS)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    cache_dir: Path = tmp_path_factory.mktemp("demo-cache")
    return Engine.load(replace(SETTINGS, cache_dir=cache_dir))


def test_faulty_requests_end_in_their_own_error_and_the_others_as_if_alone(engine: Engine) -> None:
    tally = play(engine, kinds(engine, PROMPTS, 10, longest=30), honest=80, wrong=5 * len(ALL))
    assert tally.right == 80
    assert set(tally.failed) == set(ALL)
    assert tally.escaped.total() < 2 * len(ALL)


@pytest.mark.parametrize("place", ALL)
def test_the_log_names_the_request_that_failed(
    engine: Engine, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    (request,) = kinds(engine, PROMPTS, 1, longest=30)
    request = replace(request, request_id="its-id/7", client=place, drafter="draft", k_draft=4)
    with faults(engine), caplog.at_level(logging.ERROR):
        last = list(engine.generate(faulty(request, place)))[-1]
    assert (last.finish, last.error) == (FinishReason.ERROR, place)
    for record in caplog.records:  # of a drafter, each that is released
        line = json.loads(JsonFormatter().format(record))
        assert line["request_id"] == "its-id"
        assert f"FaultError: {place}" in line["exception"]
    assert caplog.records
