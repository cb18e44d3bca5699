"""A request in which something goes wrong fails alone; a drafter that fails costs only speed."""

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
from tests.faults import ALL, FaultError, faults, faulty, heldout, kinds, play
from tests.simulated_target import (
    SimulatedTarget,
    Text,
    expected,
    make_request,
    make_scheduler,
    serve,
    tinyllama,
)
from tests.speculation.drafters.scripted import Scripted, ScriptedModel

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
    with faults(), caplog.at_level(logging.ERROR):
        last = list(engine.generate(faulty(request, place)))[-1]
    assert (last.finish, last.error) == (FinishReason.ERROR, place)
    (record,) = caplog.records
    line = json.loads(JsonFormatter().format(record))
    assert line["request_id"] == "its-id"
    assert f"FaultError: {place}" in line["exception"]


@pytest.mark.parametrize("when", [1, 3])
@pytest.mark.parametrize(
    "method",
    [
        "begin",
        "is_synced",
        "read",
        "propose",
        "required_prefix",
        "release",
        "publish_hidden_states",
    ],
)
def test_a_drafter_that_fails_is_switched_off_and_requests_go_on(
    method: str, when: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, head = SimulatedTarget(), ScriptedModel(Text(), name="head", reads=True)
    monkeypatch.setattr(ScriptedModel, "follows", True)
    lookup, calls = Scripted(Text(), 1.0, name="suffix"), list[object]()
    broken = target if method == "publish_hidden_states" else head
    work = getattr(broken, method)

    def failing(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == when:
            raise FaultError(method)
        return work(*arguments)

    monkeypatch.setattr(broken, method, failing)
    scheduler = make_scheduler(target, [lookup, head], draft_costs=tinyllama(0.1))
    scheduler.drafters["cascade"] = (lookup, head)  # type: ignore[index]
    drafters = ("head", "cascade", "head", "cascade")
    requests = [make_request(60, 30, drafter=name, k_draft=3) for name in drafters]
    served = serve(scheduler, *requests)
    for request in requests:
        assert served.tokens(request) == expected(target.text, request)
    assert len(calls) == when  # never again
    (record,) = caplog.records
    line = json.loads(JsonFormatter().format(record))
    assert (line["level"], line["drafter"]) == ("error", "head")
    assert f"FaultError: {method}" in line["exception"]
    assert [name for step in served.results for name in step.failed_drafters] == ["head"]
    assert served.stats(requests[1]).accepted_tokens > 10  # by the lookup
    assert target.cache.used_blocks == 0
