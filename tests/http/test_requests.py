"""Prompts, templates and bodies of requests; their fields: test_fields.py."""

import asyncio
import gzip
import json
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import zstandard

from specops.http.security.request_body import MAX_BODY_BYTES
from specops.request import FinishReason, Grammar, GrammarKind
from specops.text.chat_template import ChatTemplate
from specops.text.confined_process import ProgramProcessError
from specops.text.template_process import SHARED, TemplateProcess
from tests.asgi import AsgiClient
from tests.fakes import INFO, FakeService, Waiting, begun, output
from tests.http.openai_api import (
    ANSWER,
    BODIES,
    CHAT,
    COMPLETIONS,
    ENDPOINTS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    api,
    both,
    problem,
)

pytestmark = pytest.mark.anyio
every = pytest.mark.parametrize("path", BODIES)
JSON = {"content-type": "application/json"}


# -- prompts -------------------------------------------------------------------------------------


@every
async def test_samplers_of_other_servers_are_named_where_they_would_do_something(
    path: str,
) -> None:
    async with api() as here:
        plain = await here.ask(path, typical_p=1.0, top_n_sigma=0, mirostat=0, xtc_probability=None)
        named = await here.ask(path, typical_p=0.9, top_n_sigma=1.5)
    assert "x-ignored-fields" not in plain.headers
    assert named.headers["x-ignored-fields"] == "typical_p, top_n_sigma"


@pytest.mark.parametrize(
    ("system", "prompt"),
    [
        (None, begun("abc")),
        ("", begun("user: abc\nassistant:")),  # once, as the template does not write it
        ("Be brief.", begun("system: Be brief.\nuser: abc\nassistant:")),
    ],
)
async def test_with_a_system_message_the_prompt_is_a_question(
    system: str | None, prompt: tuple[int, ...]
) -> None:
    async with api() as here:
        assert (await here.generate(system=system)).status_code == 200
    assert here.request.prompt_tokens == prompt


async def test_messages_go_through_the_models_template() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    async with api() as here:
        await here.ask(CHAT, messages=messages)
        applied = await here.client.post("/apply-template", json={"messages": messages})
    assert here.request.prompt_tokens == begun(applied.json()["prompt"])
    assert applied.json()["prompt"] == "system: Be brief.\nuser: a\nb\nassistant:"


@every
async def test_long_prompts_are_encoded_whole(path: str) -> None:
    text = "x " * 100_000
    messages = {"messages": [{"role": "user", "content": text}]}
    async with api() as here:
        await here.ask(path, **(messages if path == CHAT else {"prompt": text}))
    assert here.request.prompt_tokens.count(ord("x")) == 100_000


@every
async def test_a_long_text_without_a_place_to_cut_it_is_refused(path: str) -> None:
    text = "x" * 100_000
    messages = {"messages": [{"role": "user", "content": text}]}
    async with api() as here:
        refused = await here.ask(path, **(messages if path == CHAT else {"prompt": text}))
        counted = await here.client.post("/tokenize", json={"content": text})
    for answer in (refused, counted):
        error = problem(answer, 400)
        assert error["code"] == "unbroken_text"
        assert "put spaces or line ends between them" in error["message"]


# -- what is refused -----------------------------------------------------------------------------


async def test_the_message_names_every_wrong_field_by_its_path() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": 5}]}]
    async with api() as here:
        error = problem(await here.generate(top_p=7, seed="x"), 422)
        assert all(word in error["message"] for word in ("top_p: ", "seed: "))
        error = problem(await here.ask(CHAT, messages=messages), 400)
    assert "messages.1.content.0.type: Input should be a valid string" in error["message"]


async def test_a_drafter_that_the_model_lacks_is_refused() -> None:
    service = FakeService(ANSWER)
    service.info = replace(INFO, drafters=("suffix", "none"))
    async with api(service) as here:
        error = problem(await here.generate(drafter="draft"), 422)
    assert error["param"] == "drafter"
    assert "suffix, none" in error["message"]


async def test_a_model_without_a_template_says_so() -> None:
    service = FakeService(ANSWER)
    service.loaded.chat_template = None
    async with api(service) as here:
        chat = problem(await here.ask(CHAT), 400)
        question = problem(await here.generate(system="Be brief."), 422)
    assert (chat["code"], chat["param"]) == ("no_chat_template", "messages")
    assert (question["code"], question["param"]) == ("no_chat_template", "system")


TOO_LARGE = "{% if messages | length > 1 %}{{ 'a' * 10**10 }}{% endif %}a"


@pytest.mark.parametrize("path", [CHAT, "/apply-template"])
async def test_a_template_that_takes_too_much_is_the_requests_error_alone(path: str) -> None:
    service = FakeService(ANSWER)
    service.loaded.chat_template = ChatTemplate(TOO_LARGE, {})
    messages = [{"role": "user", "content": "a"}]
    async with api(service) as here:
        assert not service.loaded.chat_template.traits.tools  # as after loading
        before = SHARED.ended["limit"]
        long, short = (BODIES[CHAT] | {"messages": messages * count} for count in (3, 1))
        error = problem(await here.client.post(path, json=long), 400)
        assert (await here.client.post(path, json=short)).status_code == 200
        shown = (await here.client.get("/metrics")).text
    assert (error["code"], error["param"]) == ("template_limit", "messages")
    assert "takes too much memory" in error["message"]
    assert f'specops_template_processes_ended_total{{kind="limit"}} {before + 1}.0' in shown


async def test_a_template_is_asked_once_if_it_always_takes_too_much() -> None:
    service = FakeService(ANSWER)
    service.loaded.chat_template = ChatTemplate("{{ 'a' * 10**10 }}{# </think> #}", {})
    async with api(service) as here:
        before = SHARED.ended["limit"]
        assert problem(await here.ask(CHAT), 400)["code"] == "template_limit"
    assert SHARED.ended["limit"] == before + 1


@pytest.mark.parametrize("path", [CHAT, "/apply-template"])
async def test_a_template_whose_process_ends_is_worth_another_try(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> str:
        raise ProgramProcessError("the system ended it")

    async with api() as here:
        monkeypatch.setattr(TemplateProcess, "render", fail)
        answer = await here.client.post(path, json=BODIES[CHAT])
    assert problem(answer, 503)["code"] == "template_process"
    assert answer.headers["retry-after"] == "5"


# -- bodies --------------------------------------------------------------------------------------

FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        *((content, JSON["content-type"], 400) for content in (b"{", b"\xff\xfe", b'{"prompt": }')),
        (b"[" * 10_000, JSON["content-type"], 400),
        (b"[" * 100_000, JSON["content-type"], 413),
        *((content, JSON["content-type"], 422) for content in (b"[]", b"3", b'"text"', b"")),
        (b'{"prompt": "abc"}', FORM, 415),
        (b'{"prompt": "' + b"a " * (MAX_BODY_BYTES // 2 - 7) + b'"}', JSON["content-type"], 200),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_a_body_is_a_json_object(content: bytes, kind: str, status: int) -> None:
    async with api() as here:
        headers = {"content-type": kind}
        response = await here.client.post(GENERATE, content=content, headers=headers)
    if status == 200:
        assert response.status_code == 200
    else:
        assert problem(response, status)["type"] == "invalid_request_error"


@pytest.mark.parametrize(("announced", "read"), [(str(MAX_BODY_BYTES + 1), 0), ("", 3)])
async def test_a_large_body_is_refused_as_soon_as_it_is_known_to_be(
    announced: str, read: int
) -> None:
    async with api() as here:
        client = AsgiClient(here.app, GENERATE, {"content-length": announced})
        for _ in range(10):
            client.send_body(b" " * (MAX_BODY_BYTES // 2), more=True)
        status, body = await client.response()
        await client.done
    assert (status, body["error"]["code"]) == (413, "body_too_large")
    assert client.received == read
    assert here.rejected("too_large") == 1


def wide_zstd(body: bytes) -> bytes:
    """Compressed for readers that have more memory than a server can promise."""
    wide = zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    return packer.compress(body) + packer.flush()


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "GZIP ": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "Deflate": raw_deflate,
    "zstd": zstandard.compress,
    "identity": bytes,
    "": bytes,
}


@pytest.mark.parametrize("encoding", PACKED)
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, GENERATE])
async def test_a_compressed_body_is_read(path: str, encoding: str) -> None:
    body = PACKED[encoding](json.dumps(ENDPOINTS[path]).encode())
    async with api() as here:
        headers = JSON | {"content-encoding": encoding}
        response = await here.client.post(path, content=body, headers=headers)
    assert response.status_code == 200, response.text
    assert "abc" in here.service.loaded.tokenizer.decode(here.request.prompt_tokens)


WHOLE = json.dumps(BODIES[GENERATE]).encode()
PACK, BOMB = gzip.compress(WHOLE, mtime=0), 100 << 20
BROKEN: dict[str, tuple[str, Callable[[], bytes], int, str]] = {
    "br": ("br", lambda: b"", 415, "unsupported_encoding"),
    "two": ("gzip, gzip", lambda: gzip.compress(PACK), 415, "unsupported_encoding"),
    "plain": ("gzip", lambda: WHOLE, 400, "invalid_encoding"),
    "no deflate": ("deflate", lambda: b"x", 400, "invalid_encoding"),
    "cut": ("gzip", lambda: PACK[:-4], 400, "invalid_encoding"),
    "more": ("gzip", lambda: PACK + b"more", 400, "invalid_encoding"),
    "largest": ("gzip", lambda: gzip.compress(bytes(MAX_BODY_BYTES)), 400, "invalid_json"),
    "larger": ("gzip", lambda: gzip.compress(bytes(MAX_BODY_BYTES + 1)), 413, "body_too_large"),
    "bomb": ("deflate", lambda: zlib.compress(bytes(BOMB), 9), 413, "body_too_large"),
    "largest zstd": (
        "zstd",
        lambda: zstandard.compress(bytes(MAX_BODY_BYTES)),
        400,
        "invalid_json",
    ),
    "larger zstd": (
        "zstd",
        lambda: zstandard.compress(bytes(MAX_BODY_BYTES + 1)),
        413,
        "body_too_large",
    ),
    "zstd bomb": ("zstd", lambda: zstandard.compress(bytes(BOMB)), 413, "body_too_large"),
    "cut zstd": ("zstd", lambda: zstandard.compress(WHOLE)[:-1], 400, "invalid_encoding"),
    "more zstd": ("zstd", lambda: zstandard.compress(WHOLE) + b"more", 400, "invalid_encoding"),
    "window": ("zstd", lambda: wide_zstd(WHOLE), 400, "invalid_encoding"),
    "deep": ("gzip", lambda: gzip.compress(b"[" * 100_000), 413, "body_too_large"),
}


@pytest.mark.parametrize(("encoding", "body", "status", "code"), BROKEN.values(), ids=BROKEN)
async def test_a_body_that_cannot_be_decompressed_is_refused(
    encoding: str, body: Callable[[], bytes], status: int, code: str
) -> None:
    async with api() as here:
        headers = JSON | {"content-encoding": encoding}
        response = await here.client.post(GENERATE, content=body(), headers=headers)
        reason = "too_large" if status == 413 else "invalid"
        assert code == "invalid_json" or here.rejected(reason) == 1
    assert problem(response, status)["code"] == code
    assert response.headers.get("accept-encoding") == (
        "gzip, deflate, zstd" if status == 415 else None
    )


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("zstd", zstandard.compress)]
)
async def test_a_body_may_be_compressed_in_parts(
    encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    whole = json.dumps({"content": "ab" * 5_000}).encode()
    parts = [pack(b""), *(pack(whole[start : start + 7]) for start in range(0, len(whole), 7))]
    async with api() as here:
        headers = JSON | {"content-encoding": encoding}
        answer = await here.client.post("/tokenize", content=b"".join(parts), headers=headers)
    assert answer.json()["tokens"] == [*b"ab" * 5_000]


async def test_no_body_needs_no_decompression() -> None:
    async with api() as here:
        headers = {"content-encoding": "gzip"}
        assert (await here.client.get("/v1/models", headers=headers)).status_code == 200
        nothing = await here.client.post(GENERATE, content=b"", headers=JSON | headers)
    assert problem(nothing, 422)["code"] == "missing_parameter"


async def test_what_is_made_of_a_body_is_bounded_and_made_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int, str]] = []
    real = zlib.decompressobj

    class Watched:
        def __init__(self, window: int) -> None:
            self._real = real(window)

        def decompress(self, body: bytearray, most_bytes: int) -> bytes:
            made.append((most_bytes, threading.current_thread().name))
            return self._real.decompress(body, most_bytes)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

    body = gzip.compress(WHOLE)
    monkeypatch.setattr(zlib, "decompressobj", Watched)
    async with api() as here:
        headers = JSON | {"content-encoding": "gzip"}
        assert (await here.client.post(GENERATE, content=body, headers=headers)).is_success
    assert made == [(MAX_BODY_BYTES + 1, "inflate_0")]


async def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    nested = "[" * 400 + "]" * 400
    body = f'{{"prompt": "a", "model": "fake", "guided_json": {{"enum": {nested}}}}}'
    async with api() as here:
        error = problem(await here.client.post(COMPLETIONS, content=body, headers=JSON), 400)
    assert error["param"] == "guided_json"


# -- slow work holds up no other request ---------------------------------------------------------


SLOW: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {}),
    (GENERATE, {"system": ""}),
    ("/v1/messages/count_tokens", BODIES[CHAT]),
    ("/apply-template", BODIES[CHAT]),
    (COMPLETIONS, {"guided_regex": "a"}),
]


@pytest.mark.parametrize(("path", "fields"), SLOW)
async def test_slow_templates_and_grammars_hold_up_no_other_request(
    path: str, fields: dict[str, Any]
) -> None:
    async with api() as here:
        slow = Waiting()
        here.service.loaded.chat_template = slow  # type: ignore[assignment]
        here.service.loaded.grammars = slow  # type: ignore[assignment]
        asked = asyncio.create_task(here.client.post(path, json=BODIES.get(path, {}) | fields))
        await asyncio.to_thread(slow.begun.wait, 60)
        assert (await here.ask(COMPLETIONS)).status_code == 200
        assert not asked.done()
        slow.may.set()
        assert (await asked).status_code == 200


async def test_a_grammar_that_cannot_be_followed_further_is_the_clients_error() -> None:
    async with api(FakeService([output(finish=FinishReason.GRAMMAR)])) as here:
        error = problem(await here.ask(CHAT, guided_regex="a+"), 400)
    assert error["code"] == "invalid_grammar"


@both
async def test_every_choice_has_a_seed_and_the_grammar(path: str) -> None:
    async with api() as here:
        await here.ask(path, n=3, seed=5, guided_regex="a")
    sampling = [request.sampling for request in here.service.requests]
    assert [item.seed for item in sampling] == [5, 6, 7]
    assert [item.grammar for item in sampling] == [Grammar(GrammarKind.REGEX, "a")] * 3
