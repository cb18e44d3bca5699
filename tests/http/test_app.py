"""/generate on a fake service, its errors and streams; health, metrics, links and the log."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from typing import Any

import pytest

from specops.engine.engine import ModelState
from specops.http.middleware import MAX_BODY_BYTES
from specops.request import FIXED_K_DRAFT, FinishReason, SamplingParams
from specops.system import logs
from tests.asgi import AsgiClient
from tests.fakes import INFO, STATS, FakeService, output
from tests.http.openai_api import ANSWER, api, chunks, problem

pytestmark = pytest.mark.anyio


# -- the plain answer --------------------------------------------------------------------------


async def test_answer_has_the_promised_fields() -> None:
    async with api() as here:
        response = await here.generate()
    assert response.status_code == 200
    body = response.json()
    assert body.pop("latency_ms") > 0
    request_id = body.pop("request_id")
    assert request_id == response.headers["x-request-id"]
    assert body == {
        "generated_text": "Hello world",
        "tokens_per_second": 2.0,
        "avg_tokens_per_jump": 2.0,
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "generated_tokens": 5,
    }


async def test_details_hold_every_figure_and_both_jumps() -> None:
    async with api() as here:
        body = (await here.generate(details=True, drafter="suffix", k_draft=4)).json()
    details = body["details"]
    figures = json.loads(json.dumps(asdict(STATS)))  # tuples become lists
    assert {name: details[name] for name in figures} == figures
    assert (details["draft_tokens"], details["accepted_tokens"]) == (3, 2)
    assert details["accepted_per_position"] == [1, 1, 0]
    assert details["tokens_per_jump"] == STATS.tokens_per_jump == 2.0
    assert details["mean_acceptance_length"] == STATS.mean_acceptance_length == 3.0
    assert (details["drafter"], details["k_draft"], details["adaptive"]) == ("suffix", 4, True)


async def test_defaults_come_from_the_settings_and_the_model() -> None:
    async with api(max_k_draft=6, request_timeout=7.0) as here:
        await here.generate()
    request = here.service.requests[0]
    assert request.prompt_tokens == (97, 98, 99)
    assert request.max_new_tokens == 50
    assert (request.drafter, request.k_draft, request.adaptive) == ("draft", 6, True)
    assert request.sampling == SamplingParams()
    assert (request.stop, request.stream, request.ignore_eos) == ((), False, False)
    assert request.deadline - request.arrival == pytest.approx(7.0)
    async with api(max_new_tokens=10) as here:  # the default bows to a smaller limit
        await here.generate()
    assert here.request.max_new_tokens == 10


async def test_an_adaptive_request_may_draft_up_to_the_servers_most() -> None:
    async with api(max_k_draft=6) as here:
        await here.generate()
        await here.generate(k_draft=4)
        await here.generate(adaptive=False)
    asked = [(request.adaptive, request.k_draft) for request in here.service.requests]
    assert asked == [(True, 6), (True, 4), (False, FIXED_K_DRAFT)]


async def test_a_stop_may_be_one_string_and_no_drafter_drafts_nothing() -> None:
    async with api() as here:
        await here.generate(stop="one", drafter="none")
    request = here.request
    assert (request.stop, request.drafter, request.k_draft) == (("one",), "none", 0)


async def test_requests_with_the_same_id_stay_apart_in_the_engine() -> None:
    async with api() as here:
        headers = {"x-request-id": "mine"}
        for _ in range(2):
            response = await here.client.post("/generate", json={"prompt": "a"}, headers=headers)
            assert response.json()["request_id"] == response.headers["x-request-id"] == "mine"
    first, second = here.service.requests
    assert first.request_id != second.request_id


@pytest.mark.parametrize("given", ["x" * 65, "with space", "ümlaut".encode().decode("latin-1"), ""])
async def test_unusable_request_id_is_replaced(given: str) -> None:
    async with api() as here:
        headers = {"x-request-id": given.encode("latin-1")}
        response = await here.client.get("/health/live", headers=headers)
    assert len(response.headers["x-request-id"]) == 32
    assert response.headers["x-request-id"] != given


# -- wrong requests ----------------------------------------------------------------------------

WRONG_FIELDS = [
    ("prompt", 5),
    ("prompt", None),
    ("prompt", "\ud800"),
    ("max_new_tokens", 0),
    ("max_new_tokens", 101),
    ("max_new_tokens", "5"),
    ("max_new_tokens", True),
    ("k_draft", -1),
    ("k_draft", 9),
    ("drafter", "oracle"),
    ("exact", "yes"),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", float("nan")),
    ("top_k", -2),
    ("top_p", 0),
    ("top_p", 1.1),
    ("seed", -1),
    ("seed", 1 << 63),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 5),
    ("stop", 3),
    ("stream", 1),
]


@pytest.mark.parametrize(("field", "value"), WRONG_FIELDS, ids=str)
async def test_wrong_field_is_named(field: str, value: Any) -> None:
    async with api(max_new_tokens=100) as here:
        content = json.dumps({"prompt": "abc"} | {field: value})
        headers = {"content-type": "application/json"}
        response = await here.client.post("/generate", content=content, headers=headers)
    error = problem(response, 422)
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: ")
    assert error["type"] == "invalid_request_error"
    assert here.service.requests == []
    assert here.rejected("invalid") == 1


async def test_unknown_and_missing_fields_have_codes_of_their_own() -> None:
    async with api(unknown_fields="refuse") as here:
        unknown = problem(await here.generate(max_new_token=5), 422)
        missing = problem(await here.client.post("/generate", json={}), 422)
    assert (unknown["code"], unknown["param"]) == ("unknown_parameter", "max_new_token")
    assert (missing["code"], missing["param"]) == ("missing_parameter", "prompt")


@pytest.mark.parametrize(
    ("system", "prompt"),
    [
        (None, "abc"),
        ("", "user: abc\nassistant:"),
        ("Be brief.", "system: Be brief.\nuser: abc\nassistant:"),
    ],
)
async def test_with_a_system_message_the_prompt_is_a_question(
    system: str | None, prompt: str
) -> None:
    async with api() as here:
        assert (await here.generate(system=system)).status_code == 200
        assert here.service.requests[0].prompt_tokens == tuple(prompt.encode())
        here.service.loaded.chat_template = None
        refused = problem(await here.generate(system="Be brief."), 422)
    assert (refused["code"], refused["param"]) == ("no_chat_template", "system")


async def test_every_wrong_field_is_in_the_message() -> None:
    async with api() as here:
        error = problem(await here.generate(top_p=7, seed="x"), 422)
    assert "top_p: " in error["message"]
    assert "seed: " in error["message"]


async def test_exact_is_accepted_and_changes_nothing() -> None:
    async with api() as here:
        for fields in ({}, {"exact": True}, {"exact": False}, {"exact": None}):
            assert (await here.generate(**fields)).status_code == 200
    plain, *others = [
        replace(request, request_id="", arrival=0, deadline=0) for request in here.service.requests
    ]
    assert others == [plain] * 3


@pytest.mark.parametrize("foreign", [(), ("/lm_head/MatMul", "/gate/MatMul")])
async def test_the_model_says_whether_its_output_depends_on_the_batch(
    foreign: tuple[str, ...],
) -> None:
    service = FakeService(ANSWER)
    service.info = replace(INFO, foreign_products=foreign)
    async with api(service) as here:
        (model,) = (await here.client.get("/v1/models")).json()["data"]
    assert (model["batch_invariant"], model["foreign_products"]) == (not foreign, list(foreign))


async def test_former_names_of_drafters_are_taken() -> None:
    service = FakeService(ANSWER)
    async with api(service) as here:
        for drafter in ("ngram", "ngram_cache", "suffix"):
            body = (await here.generate(share_ngrams=False, drafter=drafter, details=True)).json()
            assert body["details"]["drafter"] == "suffix"
    assert [request.drafter for request in service.requests] == ["suffix"] * 3


async def test_drafter_that_the_model_lacks_is_refused() -> None:
    service = FakeService(ANSWER)
    service.info = replace(INFO, drafters=("suffix", "none"))
    async with api(service) as here:
        error = problem(await here.generate(drafter="draft"), 422)
    assert error["param"] == "drafter"
    assert "suffix, none" in error["message"]


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 100_000, b'{"prompt": }'])
async def test_broken_json_is_400(content: bytes) -> None:
    async with api() as here:
        headers = {"content-type": "application/json"}
        response = await here.client.post("/generate", content=content, headers=headers)
    assert problem(response, 400)["type"] == "invalid_request_error"


@pytest.mark.parametrize("content", [b"[]", b"3", b'"text"', b""])
async def test_body_that_is_no_object_is_422(content: bytes) -> None:
    async with api() as here:
        headers = {"content-type": "application/json"}
        response = await here.client.post("/generate", content=content, headers=headers)
    problem(response, 422)


async def test_body_that_does_not_claim_to_be_json_is_415() -> None:
    async with api() as here:
        headers = {"content-type": "application/x-www-form-urlencoded"}
        content = b'{"prompt": "abc"}'
        response = await here.client.post("/generate", content=content, headers=headers)
    assert "Content-Type: application/json" in problem(response, 415)["message"]


async def test_unknown_path_and_method_are_error_objects() -> None:
    async with api() as here:
        missing = await here.client.get("/generat")
        wrong = await here.client.get("/generate")
    assert problem(missing, 404)["code"] == "not_found"
    assert "GET / lists" in problem(missing, 404)["message"]
    assert problem(wrong, 405)["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"


async def test_announced_large_body_is_refused_unread() -> None:
    async with api() as here:
        headers = {"content-length": str(MAX_BODY_BYTES + 1)}
        client = AsgiClient(here.app, "/generate", headers)
        status, body = await client.response()
        await client.done
    assert (status, body["error"]["code"]) == (413, "body_too_large")
    assert client.received == 0
    assert here.rejected("too_large") == 1


async def test_unannounced_large_body_is_refused_at_the_limit() -> None:
    async with api() as here:
        client = AsgiClient(here.app, "/generate")
        for _ in range(10):
            client.send_body(b" " * (MAX_BODY_BYTES // 2), more=True)
        status, body = await client.response()
        await client.done
    assert (status, body["error"]["code"]) == (413, "body_too_large")
    assert client.received == 3


async def test_body_at_the_limit_is_read() -> None:
    async with api() as here:
        start, end = b'{"prompt": "', b'"}'
        content = start + b"a" * (MAX_BODY_BYTES - len(start) - len(end)) + end
        headers = {"content-type": "application/json"}
        response = await here.client.post("/generate", content=content, headers=headers)
    assert response.status_code == 200


# -- streams -----------------------------------------------------------------------------------


async def test_stream_brings_every_step_then_the_answer_then_done() -> None:
    async with api() as here:
        response = await here.generate(stream=True)
        plain = (await here.generate()).json()
    assert response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers
    *steps, answer = chunks(response)
    assert steps == [
        {
            "text": "Hello",
            "tokens": [
                {"id": 3, "text": "Hel", "origin": "target"},
                {"id": 2, "text": "lo", "origin": "target"},
            ],
        },
        {"text": " wor", "tokens": [{"id": 4, "text": " wor", "origin": "draft"}]},
        {"text": "ld", "tokens": [{"id": 2, "text": "ld", "origin": "target"}]},
    ]
    assert answer.pop("request_id") == response.headers["x-request-id"]
    assert answer.pop("latency_ms") > 0
    assert answer == {
        name: value for name, value in plain.items() if name not in ("request_id", "latency_ms")
    }


async def test_text_with_line_ends_is_still_one_event() -> None:
    text = "a\n\nb\r\u2028c"
    async with api(FakeService([output(text, finish=FinishReason.STOP)])) as here:
        first = chunks(await here.generate(stream=True))[0]
    assert first["text"] == text


async def test_first_token_is_sent_before_the_second_is_there() -> None:
    async with api(FakeService()) as here:
        client = AsgiClient(here.app, "/generate").send_json({"prompt": "a", "stream": True})
        handle = await here.service.submitted.get()
        handle.push(output("first"))
        assert (await client.next_event())["text"] == "first"
        handle.push(output("second", finish=FinishReason.LENGTH))
        assert (await client.next_event())["text"] == "second"
        assert (await client.next_event())["finish_reason"] == "length"
        await client.done


# -- health, metrics, index --------------------------------------------------------------------


@pytest.mark.parametrize("state", list(ModelState))
async def test_health_is_200_only_when_ready(state: ModelState) -> None:
    service = FakeService()
    service.state, service.detail, service.running, service.waiting = state, "busy", 2, 3
    async with api(service) as here:
        response = await here.client.get("/health")
        head = await here.client.head("/health")
    expected = 200 if state is ModelState.READY else 503
    assert response.status_code == head.status_code == expected
    assert head.content == b""
    assert response.json() == {
        "state": state.value,
        "detail": "busy",
        "model": "fake",
        "error": None,
        "running": 2,
        "waiting": 3,
    }


async def test_health_of_a_failed_load_says_why_and_stays_alive() -> None:
    service = FakeService()
    service.state, service.info, service.error = ModelState.FAILED, None, "no such folder"
    service.alive = False
    async with api(service, model="demo") as here:
        health = await here.client.get("/health")
        live = await here.client.get("/health/live")
    assert health.status_code == 503
    assert (health.json()["error"], health.json()["model"]) == ("no such folder", "demo")
    assert live.status_code == 200


async def test_dead_engine_asks_for_a_restart() -> None:
    service = FakeService()
    async with api(service) as here:
        assert (await here.client.get("/health/live")).status_code == 200
        service.alive = False
        assert (await here.client.get("/health/live")).status_code == 503


async def test_metrics_are_prometheus_text() -> None:
    async with api() as here:
        response = await here.client.get("/metrics")
        wanted = {"accept": "application/openmetrics-text; version=1.0.0"}
        openmetrics = await here.client.get("/metrics", headers=wanted)
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "specops_latency_seconds_bucket" in response.text
    assert "specops_avg_jump 0.0" in response.text
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")


async def test_index_links_lead_somewhere() -> None:
    async with api() as here:
        index = (await here.client.get("/")).json()
        schema = (await here.client.get("/openapi.json")).json()
        assert (await here.client.get("/docs")).status_code == 200
    fixed = {path for path in schema["paths"] if "{" not in path}
    assert fixed <= set(index["links"].values()) | {"/"}
    assert index["links"]["generate"] == "/generate"


async def test_service_lives_as_long_as_the_application() -> None:
    async with api() as here:
        async with here.app.router.lifespan_context(here.app):
            assert here.service.calls == ["start"]
        assert here.service.calls == ["start", "stop"]


# -- logs --------------------------------------------------------------------------------------


async def test_log_lines_are_json_with_the_requests_id_and_without_its_prompt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = logging.getLogger()
    before = root.handlers, root.level
    logs.configure("debug")
    try:
        async with api() as here:
            prompt = "tell nobody of this"
            for body in ({}, {"stream": True}, {"top_p": 7}, {"stop": 3}):
                content = {"prompt": prompt, **body}
                await here.client.post(
                    "/generate", json=content, headers={"x-request-id": "the-id"}
                )
            here.service.refusal = RuntimeError("unforeseen")
            await here.client.post(
                "/generate", json={"prompt": prompt}, headers={"x-request-id": "the-id"}
            )
    finally:
        root.handlers, root.level = before
    text = capsys.readouterr().err
    lines = [json.loads(line) for line in text.splitlines()]
    ours = [line for line in lines if line["logger"].startswith("specops")]
    assert {line["request_id"] for line in ours} == {"the-id"}
    answered = [line for line in ours if line["message"] == "request"]
    assert [line["status"] for line in answered] == [200, 200, 422, 422, 500]
    assert all(line["path"] == "/generate" and line["seconds"] > 0 for line in answered)
    assert any("unforeseen" in line.get("exception", "") for line in ours)
    assert prompt not in text
