"""What the service says of itself: models, health, metrics, links; ids, keys and the log."""

import json
import logging
import re
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

import pytest

from specops.engine.model_info import ModelState
from specops.http import middleware
from specops.sampling_defaults import SamplingDefaults
from specops.serving.admission import QueueFull, RefusalReason
from specops.serving.async_engine import NotReady
from specops.system import logs
from specops.system.failures import OncePerMinute
from specops.text.grammar import Grammars
from tests.fakes import INFO, FakeService, FakeTokenizer
from tests.http.openai_api import (
    ANSWER,
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    ENDPOINTS,
    GENERATE,
    MESSAGES,
    api,
    problem,
)

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("foreign", [(), ("/lm_head/MatMul", "/gate/MatMul")])
async def test_the_loaded_model_is_described(foreign: tuple[str, ...]) -> None:
    service = FakeService(ANSWER)
    sampling = SamplingDefaults(temperature=0.2)
    service.info = replace(INFO, ort_matmuls=foreign, sampling=sampling, system="Be brief.")
    async with api(service) as here:
        listed = (await here.client.get("/v1/models")).json()
        alone = (await here.client.get("/v1/models/fake")).json()
        other = await here.client.get("/v1/models/org/other")
        of_anthropic = {"anthropic-version": "2023-06-01"}
        theirs = await here.client.get("/v1/models/other", headers=of_anthropic)
    assert (listed["object"], listed["data"]) == ("list", [alone])
    assert (listed["first_id"], listed["has_more"]) == ("fake", False)
    created = datetime.fromisoformat(alone.pop("created_at"))
    assert alone.pop("created") == created.timestamp() > 0
    can = alone.pop("capabilities")
    assert {name for name, sent in can.items() if sent["supported"]} == {"structured_outputs"}
    assert alone == {
        "lifecycle": "active", "line": None, "deprecated_at": None, "retires_at": None,
        "max_input_tokens": 63, "max_tokens": 63,
        "id": "fake", "object": "model", "type": "model", "display_name": "fake",
        "max_model_len": 64, "owned_by": "specops", "context_length": 64,
        "quantization": "int8-128", "drafters": list(INFO.drafters), "chat": False,
        "batch_invariant": not foreign, "foreign_products": list(foreign),
        "sampling": {"temperature": 0.2}, "system": "Be brief.",
    }  # fmt: skip
    assert problem(other, 404)["code"] == "model_not_found"
    assert problem(theirs, 404)["type"] == "not_found_error"


async def test_a_model_whose_grammars_do_not_fit_says_so_and_refuses_them() -> None:
    service = FakeService(ANSWER)
    service.loaded.grammars = Grammars(FakeTokenizer(), INFO.vocab_size, frozenset({0}))
    service.loaded.grammars.vocabulary.refused = "they need 90 MB: raise the limit"
    async with api(service) as here:
        model = (await here.client.get("/v1/models/fake")).json()
        refused = await here.ask(COMPLETIONS, guided_regex="a")
        assert (await here.ask(COMPLETIONS)).status_code == 200
    assert model["constraints_refused"] == "they need 90 MB: raise the limit"
    assert model["capabilities"]["structured_outputs"] == {"supported": False}
    error = problem(refused, 400)
    assert (error["code"], error["param"]) == ("invalid_grammar", "guided_regex")
    assert "they need 90 MB: raise the limit" in error["message"]


@pytest.mark.parametrize("name", ["fake", "fake:latest", "Fake", "FAKE:LATEST"])
async def test_the_model_is_found_by_each_name_that_ollamas_clients_give_it(name: str) -> None:
    async with api(unknown_model="refuse") as here:
        for path in ENDPOINTS.keys() - {EMBEDDINGS}:
            assert (await here.ask(path, model=name)).status_code == 200
        counted = await here.client.post(
            f"{MESSAGES}/count_tokens", json=ENDPOINTS[CHAT] | {"model": name}
        )
        described = await here.client.get(f"/v1/models/{name}")
        for wrong in (f"{name}:8b", f"{name}:latest:latest", ":latest"):
            assert (await here.ask(CHAT, model=wrong)).status_code == 404
        # llama.vim sends an empty name; llama-server has one model.
        assert (await here.ask(CHAT, model="")).status_code == 200
    assert (counted.status_code, described.json()["id"]) == (200, "fake")


async def test_a_question_about_the_service_is_never_counted_as_refused() -> None:
    service = FakeService()
    service.info = None
    async with api(service) as here:
        problem(await here.client.get("/v1/models"), 503)
        problem(await here.ask(CHAT), 503)
    assert here.rejected("not_ready") == 1


async def test_unknown_path_and_method_are_error_objects() -> None:
    async with api() as here:
        missing = await here.client.get("/generat")
        wrong = await here.client.get(GENERATE)
    assert problem(missing, 404)["code"] == "not_found"
    assert "GET /docs shows" in problem(missing, 404)["message"]
    assert problem(wrong, 405)["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"


async def test_an_error_has_no_commands_for_terminals() -> None:
    async with api(unknown_model="refuse") as here:
        answers = [
            await here.client.get("/%1b]0;x%07%9b31m"),
            await here.client.post(CHAT, json=ENDPOINTS[CHAT] | {"model": "a\x1b[2J\x7f\u009b"}),
        ]
    for answer in answers:
        message = answer.json()["error"]["message"]
        assert "x1b" in message
        assert message.isprintable()


async def test_a_failure_tells_nobody_where_files_are() -> None:
    service = FakeService()
    service.state = ModelState.FAILED
    service.error = "cannot read '/srv/models/a b/x.gguf' or /root/.cache: see https://x.org/a/b"
    async with api(service) as here:
        health = (await here.client.get("/health")).json()["error"]
        told = problem(await here.ask(CHAT), 503)["message"]
    assert health == told == "cannot read 'a b/x.gguf' or .cache: see https://x.org/a/b"


@pytest.mark.parametrize("state", list(ModelState))
async def test_health_is_200_only_when_ready(state: ModelState) -> None:
    service = FakeService()
    service.state, service.detail, service.running, service.waiting = state, "busy", 2, 3
    async with api(service) as here:
        response = await here.client.get("/health")
    expected = 200 if state is ModelState.READY else 503
    assert response.status_code == expected
    assert response.json() == {
        "status": "ok" if expected == 200 else state.value, "state": state.value,
        "detail": "busy", "model": "fake", "running": 2, "waiting": 3,
    }  # fmt: skip


@pytest.mark.parametrize(("loaded", "status"), [(False, 200), (True, 503)])
async def test_only_an_engine_that_has_served_asks_for_a_restart(loaded: bool, status: int) -> None:
    service = FakeService()
    async with api(service, model="demo") as here:
        assert (await here.client.get("/health/live")).status_code == 200
        service.state, service.error, service.alive = ModelState.FAILED, "no such folder", False
        service.info = INFO if loaded else None
        health = await here.client.get("/health")
        assert (await here.client.get("/health/live")).status_code == status
    assert health.status_code == 503
    assert health.json()["error"] == "no such folder"
    assert health.json()["model"] == ("fake" if loaded else "demo")


async def test_metrics_are_prometheus_text() -> None:
    async with api() as here:
        for shape in ("ramp", "ramp", "made up"):
            await here.client.get("/health", headers={"x-load-test": shape})
        response = await here.client.get("/metrics")
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        openmetrics = await here.client.get("/metrics", headers=accept)
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "specops_avg_jump NaN" in response.text
    assert 'specops_load_test_requests_total{shape="ramp"} 2.0' in response.text
    assert 'specops_load_test_requests_total{shape="other"} 1.0' in response.text
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")


async def test_requests_are_counted_by_endpoint_and_status() -> None:
    """A value of a label for each route: a client that asks for many paths adds none."""
    async with api() as here:
        before = len(here.http_counts())
        await here.ask(CHAT)
        await here.ask(CHAT, temperature=-1)
        for model in ("fake", "a", "org/b"):
            await here.client.get(f"/v1/models/{model}")
        for path in ("/wp-admin", "/.env", "/v1/chat/completion"):
            await here.client.get(path)
        await here.client.get(CHAT)
        counts = here.http_counts()
    assert {labels: value for labels, value in counts.items() if value} == {
        (CHAT, "200"): 1,
        (CHAT, "400"): 1,
        (CHAT, "405"): 1,
        ("/v1/models/{model}", "200"): 1,
        ("/v1/models/{model}", "404"): 2,
        ("other", "404"): 3,
    }
    assert len(counts) == before + 2  # (CHAT, 405) and a model's 404


async def test_links_and_description_agree_and_have_our_errors_alone() -> None:
    async with api() as here:
        index = (await here.client.get("/", headers={"accept": "application/json"})).json()
        text = (await here.client.get("/openapi.json")).text
    paths = json.loads(text)["paths"]
    fixed = {path for path in paths if "{" not in path}
    assert fixed <= set(index["links"].values()) | {"/"}
    assert index["links"]["generate"] == GENERATE
    assert "HTTPValidationError" not in text
    assert set(paths[CHAT]["post"]["responses"]) == {
        *("200", "400", "401", "404", "408", "413", "415", "429", "500", "503", "504")
    }
    assert "422" in paths[GENERATE]["post"]["responses"]


# -- ids -----------------------------------------------------------------------------------------


async def test_requests_with_the_same_id_stay_apart_in_the_engine() -> None:
    async with api() as here:
        here.client.headers["x-request-id"] = "mine"
        for _ in range(2):
            response = await here.generate()
            assert response.json()["request_id"] == response.headers["x-request-id"] == "mine"
    first, second = here.service.requests
    assert first.request_id != second.request_id


@pytest.mark.parametrize("given", ["x" * 65, "with space", "ümlaut".encode().decode("latin-1"), ""])
async def test_an_unusable_request_id_is_replaced(given: str) -> None:
    async with api() as here:
        headers = {"x-request-id": given.encode("latin-1")}
        response = await here.client.get("/health/live", headers=headers)
    assert len(response.headers["x-request-id"]) == 32
    assert response.headers["x-request-id"] != given


# -- keys ----------------------------------------------------------------------------------------

KEYS = "first-key,alice:second-key"
CLOSED = (*ENDPOINTS, "/v1/models", "/v1/other", "/tokenize", "/api/chat", "/infill", "/props")


@pytest.mark.parametrize(
    "header",
    [
        {"authorization": "Bearer first-key"},
        {"authorization": "Bearer second-key"},
        {"x-api-key": "second-key"},
        {"x-api-key": "second-key", "authorization": "Bearer another"},
        {"x-api-key": "another", "authorization": "Bearer first-key"},
    ],
)
async def test_any_of_the_keys_opens(header: dict[str, str]) -> None:
    async with api(api_keys=KEYS) as here:
        here.client.headers.update(header)
        for path in (CHAT, MESSAGES, GENERATE):
            assert (await here.ask(path)).status_code == 200
        assert (await here.client.get("/v1/models")).status_code == 200


async def test_a_key_is_a_client_that_is_known_by_its_name() -> None:
    async with api(api_keys=f"{KEYS},alice:new:key") as here:
        for key in ("first-key", "second-key", "first-key", "new:key"):
            here.client.headers["authorization"] = f"Bearer {key}"
            await here.ask(CHAT)
        page = (await here.client.get("/metrics")).text
    clients = [request.client for request in here.service.requests]
    assert clients == ["key-1", "alice", "key-1", "alice"]
    assert set(re.findall(r'client="(.*?)"', page)) == {"key-1", "alice"}
    assert not re.search("(first|second|new).key", page)
    async with api() as here:
        await here.ask(CHAT)
        page = (await here.client.get("/metrics")).text
    assert here.request.client == ""
    assert set(re.findall(r'client="(.*?)"', page)) == {"everyone"}


@pytest.mark.parametrize("keys", ["", KEYS])
async def test_a_key_of_their_own_closes_the_metrics(keys: str) -> None:
    async with api(api_keys=keys, metrics_key="scraper") as here:
        for key in ("", "first-key", "second-key", "scrape"):
            here.client.headers["authorization"] = f"Bearer {key}"
            refused = await here.client.get("/metrics")
            assert "SPECOPS_METRICS_KEY" in problem(refused, 401)["message"]
            assert "specops_" not in refused.text
        here.client.headers["authorization"] = "Bearer scraper"
        assert "specops_avg_jump" in (await here.client.get("/metrics")).text
        assert (await here.ask(CHAT)).status_code == (401 if keys else 200)
        assert here.rejected("unauthorized") == 4 + bool(keys)


@pytest.mark.parametrize(
    "value",
    [None, "", "Bearer", "Bearer ", "Bearer first", "Basic first-key", "first-key", "Bearer é"],
)
async def test_without_a_key_it_is_401(value: str | None) -> None:
    headers = {} if value is None else {"authorization": value.encode()}
    async with api(api_keys=KEYS) as here:
        for path in CLOSED:
            response = await here.client.post(path, headers=headers, content=b"{}")
            assert response.status_code == 401, path
            assert "Authorization: Bearer KEY" in response.text
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"]
        error = problem(await here.client.post(CHAT, headers=headers), 401)
        for path in ("/", "/health", "/health/live", "/metrics"):  # all: test_promises.py
            assert (await here.client.get(path)).status_code == 200
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert here.rejected("unauthorized") == len(CLOSED) + 1
    assert not here.service.requests


async def test_only_who_has_a_key_counts_as_a_load_test() -> None:
    async with api(api_keys=KEYS) as here:
        for key in ("another", "first-key"):
            headers = {"x-load-test": "ramp", "authorization": f"Bearer {key}"}
            for path in ("/health", "/v1/models"):
                await here.client.get(path, headers=headers)
        page = (await here.client.get("/metrics")).text
    assert 'specops_load_test_requests_total{shape="ramp"} 2.0' in page


# -- the log -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shows", [False, True])
async def test_the_log_has_figures_and_no_text_unless_asked(
    shows: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "specops")
    async with api(log_level="info+prompts" if shows else "info") as here:
        await here.ask(CHAT, n=2)
        await here.ask(COMPLETIONS, stream=True)
        await here.generate()
    lines = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
    assert [line["finish"] for line in lines] == [["stop"] * 2, ["stop"], ["stop"]]
    assert [line["generated_tokens"] for line in lines] == [10, 5, 5]
    assert all(line["queue_seconds"] == 0.25 for line in lines)
    prompts = [[{"role": "user", "content": "abc"}], "abc", "abc"] if shows else [None] * 3
    answers = [["Hello world"] * len(line["finish"]) if shows else None for line in lines]
    assert [line.get("prompt") for line in lines] == prompts
    assert [line.get("answers") for line in lines] == answers
    assert shows or ("abc" not in str(lines) and "Hello" not in str(lines))


async def test_requests_that_are_refused_or_cut_off_do_not_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line a minute for each kind of them, with the number of the others; answers have all."""
    now = 1000.0
    monkeypatch.setattr(middleware, "OncePerMinute", partial(OncePerMinute, lambda: now))
    caplog.set_level("INFO", "specops")

    def lines() -> list[tuple[str, int, int | None]]:
        found = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
        caplog.clear()
        return [(line["path"], line["status"], line.get("left_out")) for line in found]

    async with api(api_keys="right") as here:
        for _ in range(50):
            await here.generate()
            await here.client.get("/v1/models")
        here.client.headers["x-api-key"] = "right"
        for _ in range(3):
            assert (await here.generate()).status_code == 200
            await here.client.get("/v1/nothing")
        refused = [(GENERATE, 401, 0), ("/v1/models", 401, 0)]
        honest = [(GENERATE, 200, None), ("/v1/nothing", 404, None)]
        assert lines() == refused + honest * 3
        for _ in range(50):
            await cut_off(here.app, GENERATE)
        assert lines() == [(GENERATE, 499, 0)]
        now += 61
        await cut_off(here.app, GENERATE)
        del here.client.headers["x-api-key"]
        await here.generate()
        assert lines() == [(GENERATE, 499, 49), (GENERATE, 401, 49)]
        for _ in range(50):  # open pages, for one who has no key
            for path in ("/", "/docs", "/openapi.json"):
                assert (await here.client.get(path)).is_success
        assert lines() == [("/", 200, 0), ("/docs", 200, 0), ("/openapi.json", 200, 0)]
        here.client.headers["x-api-key"] = "right"
        full, not_ready = QueueFull(3, RefusalReason.KV_TOKENS), NotReady(ModelState.LOADING, "")
        for refusal, status in ((full, 429), (not_ready, 503)):  # of the engine, after its work
            here.service.refusal = refusal
            for _ in range(50):
                assert (await here.generate()).status_code == status
            assert lines() == [(GENERATE, status, 0)]
        del here.client.headers["x-api-key"]
        caplog.set_level("DEBUG", "specops")
        await here.generate()
        assert lines() == [(GENERATE, 401, None)]


async def cut_off(app: Any, path: str) -> None:
    """Send half a body, and leave."""
    received = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        return received.pop(0)

    async def send(_: Any) -> None:
        raise AssertionError("nobody is there")

    headers = [(b"host", b"localhost"), (b"x-api-key", b"right")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    await app(scope, receive, send)


async def test_log_lines_are_json_with_the_requests_id_and_without_its_prompt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = logging.getLogger()
    before = root.handlers, root.level
    logs.configure("debug")
    prompt = "tell nobody of this"
    try:
        async with api() as here:
            here.client.headers["x-request-id"] = "the-id"
            for body in ({}, {"stream": True}, {"top_p": 7}, {"stop": 3}):
                await here.generate(prompt=prompt, **body)
            here.service.refusal = RuntimeError("unforeseen")
            await here.generate(prompt=prompt)
    finally:
        root.handlers, root.level = before
    text = capsys.readouterr().err
    lines = [json.loads(line) for line in text.splitlines()]
    ours = [line for line in lines if line["logger"].startswith("specops")]
    assert {line["request_id"] for line in ours} == {"the-id"}
    answered = [line for line in ours if line["message"] == "request"]
    assert [line["status"] for line in answered] == [200, 200, 422, 422, 500]
    assert all(line["path"] == GENERATE and line["seconds"] > 0 for line in answered)
    assert any("unforeseen" in line.get("exception", "") for line in ours)
    assert prompt not in text
