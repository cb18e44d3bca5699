"""llama-server's protocol: what llama.vim and llama.vscode send, and what they read of answers."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import httpx
import pytest

from loadtest.editor_trace import ASKING, WARMING
from specops.config import Settings
from specops.request import FinishReason, Output
from specops.runtime.batch import Batch
from specops.runtime.cost_model import PrefillSpeed
from specops.runtime.sampling import Floats
from specops.text.chat_template import ChatTemplate
from specops.text.fill_in import FORMS
from specops.text.tokenizer import Tokenizer
from tests.asgi import AsgiClient
from tests.fakes import (
    BEGIN_TOKEN,
    FILE,
    INFO,
    MIDDLE,
    PREFIX,
    STATS,
    SUFFIX,
    FakeService,
    fills_in,
    output,
)
from tests.fuzz.requests import filling_in
from tests.http.chat_clients import TEMPLATE
from tests.http.openai_api import Api, api, events, problem
from tests.text import published_tokenizers as published
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio
TOKEN_SECONDS, PAIR_SECONDS = 0.004, 1e-6
GAP = {"input_prefix": "ab", "input_suffix": "cd"}
CHUNK = {"text": "import os\n", "time": [3, 141592], "filename": "a.py"}
# As the plug-ins send them: `loadtest.editor_trace` has llama.vim's fields; src/llama-server.ts of
# llama.vscode, autumn of 2026.
VIM = {
    **ASKING, "input_prefix": "def f():\n", "input_suffix": "\n\n", "input_extra": [CHUNK],
    "prompt": "    ret", "n_indent": 4,
}  # fmt: skip
VIM_WARMS = {**WARMING, "input_extra": [CHUNK]}
CODE = {
    "id_slot": 0, "input_prefix": "def f():\n", "input_suffix": "\n", "input_extra": [CHUNK],
    "prompt": "    ret", "n_predict": 128, "n_cmpl": 3, "top_k": 40, "top_p": 0.99, "stream": False,
    "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "n_indent": 4,
    "t_max_prompt_ms": 500, "t_max_predict_ms": 2500,
}  # fmt: skip
CODE_WARMS = {
    "id_slot": 0, "input_prefix": "", "input_suffix": "", "input_extra": [CHUNK], "prompt": "",
    "n_predict": 0, "samplers": [], "cache_prompt": True, "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1,
}  # fmt: skip


@asynccontextmanager
async def coder(*answer: Output, **settings: Any) -> AsyncIterator[Api]:
    """A service with a scripted model that fills in; it refuses fields that it does not know."""
    service = FakeService(answer or (output("x", "y"), output(finish=FinishReason.STOP)))
    service.loaded.tokenizer = fills_in()
    service.info = replace(INFO, context=4096, reading=PrefillSpeed(TOKEN_SECONDS, PAIR_SECONDS))
    async with api(service, unknown_fields="refuse", **settings) as here:
        yield here


async def asked(here: Api, body: dict[str, Any], path: str = "/infill") -> httpx.Response:
    answer = await here.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


# -- what the plug-ins send --------------------------------------------------------------------


async def test_llama_vims_suggestion() -> None:
    async with coder() as here:
        answer = await asked(here, VIM)
    request = here.request
    assert request.prompt_tokens == (
        *(BEGIN_TOKEN, FILE, *b"a.py\nimport os\n", FILE, *b"filename\n"),
        *(PREFIX, *b"def f():\n", SUFFIX, *b"\n\n", MIDDLE, *b"    ret"),
    )
    assert (request.max_new_tokens, request.predict_seconds, request.min_indent) == (128, 0.25, 4)
    assert (request.priority, request.sampling.temperature) == (-1, 0.0)
    assert set(answer.json()) == set(VIM["response_fields"])
    assert (answer.json()["content"], answer.json()["truncated"]) == ("xy", False)
    assert answer.json()["timings/predicted_n"] == STATS.generated_tokens


async def test_llama_vims_instructions_are_warmed_while_they_are_typed() -> None:
    turns = [{"role": "user", "content": "Explain: def f()"}]
    body = {"id_slot": 1, "messages": turns, "samplers": [], "n_predict": 0, "stream": False,
            "cache_prompt": True, "response_fields": [""], "model": ""}  # fmt: skip
    service = FakeService([output(finish=FinishReason.LENGTH)])
    service.loaded.chat_template = ChatTemplate(TEMPLATE, {})
    async with api(service) as here:
        answer = await asked(here, body, "/v1/chat/completions")
        assert (here.request.max_new_tokens, here.request.priority) == (0, 1)
    (choice,) = answer.json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


async def test_llama_vscodes_suggestions() -> None:
    async with coder(output("x", finish=FinishReason.STOP), max_new_tokens=500) as here:
        answers = (await asked(here, CODE)).json()
        by_another_name = {"n" if name == "n_cmpl" else name: CODE[name] for name in CODE}
        assert len((await asked(here, by_another_name)).json()) == 3
    assert [answer["content"] for answer in answers] == ["x"] * 3
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    assert {"prompt_n", "prompt_ms", "predicted_n", "predicted_ms"} <= set(answers[0]["timings"])
    first, *others = here.service.requests[:3]
    assert [request.sampling.temperature for request in others] == [1.0, 1.0]
    assert (first.sampling.temperature, first.priority) == (0.0, -1)
    assert [request.prompt_tokens for request in others] == [first.prompt_tokens] * 2


@pytest.mark.parametrize("body", [VIM_WARMS, CODE_WARMS])
async def test_warming_reads_all_chunks_last_and_answers_nothing(body: dict[str, Any]) -> None:
    async with coder(output(finish=FinishReason.LENGTH)) as here:
        answer = await asked(here, body)
    chunks = (BEGIN_TOKEN, FILE, *b"a.py\nimport os\n", FILE, *b"filename\n")
    assert here.request.prompt_tokens == (*chunks, PREFIX, SUFFIX, MIDDLE)
    assert (here.request.max_new_tokens, here.request.priority) == (0, 1)
    assert answer.json() == {} or (answer.json()["content"], answer.json()["stop_type"]) == (
        "",
        "limit",
    )


async def test_llama_vscode_finds_the_context_and_the_state() -> None:
    async with coder() as here:
        here.service.loaded.chat_template = None
        props = (await here.client.get("/props?model=fake&autoload=false")).json()
        assert props["default_generation_settings"]["n_ctx"] == 4096
        assert props["default_generation_settings"]["params"]["top_k"] == 40
        assert (props["model_alias"], props["total_slots"]) == ("fake", INFO.slots)
        assert (await here.client.get("/health")).json()["status"] == "ok"
        counted = {"content": "abc", "add_special": False, "parse_special": True}
        assert (await asked(here, counted, "/tokenize")).json() == {"tokens": [*b"abc"]}


async def test_a_model_that_cannot_fill_in_says_so_in_llama_servers_words() -> None:
    async with api() as here:
        error = problem(await here.client.post("/infill", json=GAP), 501)
    assert error["message"].startswith("Infill is not supported by this model: prefix token is")
    assert error["type"] == "not_supported_error"


# -- the prompt --------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [0, 9])
@pytest.mark.parametrize(("chunks", "milliseconds"), [(0, 1000), (1, 1000), (80, 1000), (9, 1)])
async def test_the_time_for_the_prompt_cuts_it_whatever_the_load_is(
    load: int, chunks: int, milliseconds: int
) -> None:
    text = "".join(map(chr, range(97, 97 + 25))) * 10
    body: dict[str, Any] = {"input_prefix": text, "input_suffix": text, "prompt": "if "}
    body["input_extra"] = [{"text": CHUNK["text"]}] * chunks
    async with coder() as here:
        here.service.running = here.service.waiting = load
        whole = (await asked(here, body)).json()
        cut = await here.client.post("/infill", json=body | {"t_max_prompt_ms": milliseconds})
    assert (whole["truncated"], cut.json()["truncated"]) == (False, True)
    assert cut.headers["x-ignored-fields"] == "prompt[far-ends]"
    tokens = here.service.requests[-1].prompt_tokens
    begin = tokens.index(PREFIX)
    assert tokens[:begin].count(FILE) == chunks + bool(chunks)

    def seconds(around: int) -> float:
        return around * (TOKEN_SECONDS + PAIR_SECONDS * (begin + around / 2))

    room = next(some for some in count(128) if seconds(some + 1) > milliseconds / 1000)
    gap, end = tokens.index(SUFFIX), tokens.index(MIDDLE)
    before, behind = bytes(tokens[begin + 1 : gap]), bytes(tokens[gap + 1 : end])
    assert text.encode().endswith(before)
    assert behind == text[: room // 4].encode()
    most = room - room // 4
    assert most * 3 // 4 <= len(before) <= most
    assert tokens[-4:] == (MIDDLE, *b"if ")


async def test_text_beyond_half_of_the_context_is_cut_in_all_protocols() -> None:
    text = "abcdefg\n" * 1000
    async with coder() as here:
        first = await here.client.post("/infill", json={"input_prefix": text, "input_suffix": text})
        for path, more in (("/v1/completions", {}), ("/api/generate", {"stream": False})):
            body = {"model": "fake", "prompt": text, "suffix": text, **more}
            answer = await here.client.post(path, json=body)
            assert answer.headers["x-ignored-fields"] == "prompt[far-ends]"
    assert first.json()["truncated"]
    assert len({request.prompt_tokens for request in here.service.requests}) == 1
    assert len(here.service.requests[0].prompt_tokens) <= 4096 // 2 + 4


async def test_a_suffix_is_encoded_once_for_all_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    async with coder() as here:
        tokenizer, encoded = here.service.loaded.tokenizer, list[str]()
        encode = tokenizer.encode_as_text

        def counted(text: str, marks: frozenset[str]) -> tuple[int, ...]:
            encoded.append(text)
            return encode(text, marks)

        monkeypatch.setattr(tokenizer, "encode_as_text", counted)
        body = {"model": "fake", "prompt": ["a", "b"], "suffix": "cd"}
        await asked(here, body, "/v1/completions")
    assert encoded.count("cd") == 1
    prompts = [request.prompt_tokens for request in here.service.requests]
    assert prompts == [
        (BEGIN_TOKEN, PREFIX, *text, SUFFIX, *b"cd", MIDDLE) for text in (b"a", b"b")
    ]


# -- answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "kind", "word"),
    [
        (output(finish=FinishReason.STOP), "eos", ""),
        (replace(output(finish=FinishReason.STOP), stop="END"), "word", "END"),
        (replace(output(finish=FinishReason.STOP), stop="<file_sep>"), "eos", ""),
        (output(finish=FinishReason.LENGTH), "limit", ""),
    ],
)
async def test_an_answer_says_why_it_ended(last: Output, kind: str, word: str) -> None:
    async with coder(output("a\n"), last) as here:
        answer = (await asked(here, GAP | {"stop": ["END"]})).json()
    assert (answer["stop_type"], answer["stopping_word"]) == (kind, word)
    assert (answer["content"], answer["has_new_line"]) == ("a\n", True)
    assert answer["generation_settings"]["stop"] == ["END"]
    assert answer["tokens_evaluated"] == len(here.request.prompt_tokens)
    assert answer["tokens_predicted"] == STATS.generated_tokens
    # Typed clients read whole numbers as such, a seed always, and samplers as a list.
    assert {type(answer["timings"][f"{name}_n"]) for name in ("cache", "prompt", "draft")} == {int}
    settings = answer["generation_settings"]
    assert settings["seed"] == 0xFFFFFFFF
    assert settings["samplers"] == ["penalties", "top_k", "top_p", "min_p", "temperature"]


async def test_letters_of_an_end_token_that_no_text_shows_are_no_stop_string(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with coder() as here:
        monkeypatch.setattr(here.service.loaded.tokenizer, "shown_bytes", lambda token: b"")
        await asked(here, GAP)
    assert (here.request.stop, here.request.stop_token_ids) == ((), (FILE,))


@pytest.mark.parametrize(("fields", "times"), [(None, 1), (["content"], 0), (["prompt"], 1)])
async def test_a_prompt_is_decoded_once_where_its_text_is_read(
    monkeypatch: pytest.MonkeyPatch, fields: list[str] | None, times: int
) -> None:
    async with coder(output("x", finish=FinishReason.STOP)) as here:
        tokenizer, decoded = here.service.loaded.tokenizer, list[Sequence[int]]()
        decode = tokenizer.decode

        def counted(tokens: Sequence[int], *, special: bool) -> str:
            decoded.append(tokens)
            return decode(tokens, special=special)

        monkeypatch.setattr(tokenizer, "decode", counted)
        answers = (await asked(here, GAP | {"n_cmpl": 3, "response_fields": fields})).json()
    assert len(answers) == 3
    assert decoded == [here.service.requests[0].prompt_tokens] * times
    assert all("cd" in answer.get("prompt", "cd") for answer in answers)


@pytest.mark.parametrize("path", ["/infill", "/completion"])
async def test_a_stream_is_parts_and_a_last_event_without_text(path: str) -> None:
    body = GAP if path == "/infill" else {"prompt": "ab"}
    async with coder() as here:
        *parts, last = events(await asked(here, body | {"stream": True}, path))
    assert "".join(part["content"] for part in parts) == "xy"
    assert [part["stop"] for part in (*parts, last)] == [*[False] * len(parts), True]
    assert (last["content"], last["stop_type"]) == ("", "eos")
    assert last["timings"]["predicted_n"] == STATS.generated_tokens


# -- a real engine -----------------------------------------------------------------------------


async def test_all_protocols_fill_a_gap_with_the_text_of_plain_decoding(
    tiny_settings: Settings,
) -> None:
    prefix, suffix, stop = "def add(a, b):\n    return", "\n\nprint(add(1, 2))", ["q"]
    common = {"temperature": 0, "stop": stop, "seed": 3}
    texts: dict[tuple[str, str], list[str]] = {}
    async with filling_in(tiny_settings) as (service, http):
        name = service.engine.info.name
        sampled = common | {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "min_p": 0}
        for how, fields in (("greedy", common), ("drawn", sampled)):
            for drafter in ("none", *service.engine.info.drafters):
                shared = fields | {"drafter": drafter, "stream": False, "model": name}
                gap = {"input_prefix": prefix, "input_suffix": suffix, "n_predict": 20}
                suffixed = {"prompt": prefix, "suffix": suffix}
                for path, body, field in (
                    ("/infill", gap, "content"),
                    ("/v1/completions", suffixed | {"max_tokens": 20}, "text"),
                    ("/api/generate", suffixed | {"num_predict": 20}, "response"),
                ):
                    answer = await http.post(path, json=shared | body)
                    assert answer.status_code == 200, answer.text
                    found = answer.json()
                    text = found["choices"][0][field] if "choices" in found else found[field]
                    texts.setdefault((how, ""), []).append(text)
    for written in texts.values():
        assert len(set(written)) == 1
        assert len(written[0]) > 5


async def test_what_was_warmed_is_not_computed_again(tiny_settings: Settings) -> None:
    chunk = {"filename": "a.py", "text": "bcdefgh\n" * 3}
    async with filling_in(replace(tiny_settings, draft="none")) as (_, http):
        gap = {"input_prefix": "x = 1\n" * 9, "input_suffix": "y", "input_extra": [chunk]}
        warm = (await http.post("/infill", json=gap | {"n_predict": 0})).json()
        assert (warm["content"], warm["tokens_predicted"], warm["stop_type"]) == ("", 0, "limit")
        assert warm["timings"]["prompt_n"] == warm["tokens_evaluated"]
        found = (await http.post("/infill", json=gap | {"n_predict": 4, "prompt": "z"})).json()
    assert found["timings"]["cache_n"] == warm["tokens_evaluated"] == found["tokens_evaluated"] - 1
    assert found["content"]


async def test_a_closed_connection_ends_its_request_within_a_pass(tiny_settings: Settings) -> None:
    async with filling_in(replace(tiny_settings, draft="none")) as (service, http):
        target, passes = service.engine.scheduler.target, list[int]()
        forward, held = target.forward, threading.Event()

        def counted(batch: Batch) -> Floats:
            passes.append(batch.num_tokens)
            if len(passes) == 3:
                assert held.wait(PATIENCE)
            return forward(batch)

        target.forward = counted  # type: ignore[method-assign]
        app = http._transport.app  # type: ignore[attr-defined]
        body = GAP | {"n_predict": 100, "ignore_eos": True}
        client = AsgiClient(app, "/infill").send_json(body)
        await until(lambda: len(passes) == 3)
        client.leave()
        await until(lambda: service._commands.qsize() == 1)
        held.set()  # the pass that was on the way ends
        await asyncio.wait_for(client.done, PATIENCE)
        await until(lambda: service.running == 0)
        assert len(passes) == 3


# -- the model's own tokens, written by the editor -------------------------------------------------

PROMPT = "<|fim_prefix|>def f(a):\n    return <|fim_suffix|>\n\nf(1)<|fim_middle|>"
ENDS = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|file_sep|>"]
# Zed's documentation, and core/llm/llms/Ollama.ts of Continue; summer of 2026.
ZED = {"model": "fake", "prompt": PROMPT, "max_tokens": 64, "temperature": 0.2, "stop": ENDS}
CONTINUE = {
    "model": "fake:latest", "prompt": PROMPT, "raw": True, "keep_alive": 1800, "stream": True,
    "options": {"temperature": 0.01, "num_predict": 64, "num_ctx": 8192, "stop": ENDS},
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", ZED), ("/api/generate", CONTINUE)], ids=["zed", "cont"]
)
async def test_a_prompt_with_its_own_tokens_is_continued(path: str, body: dict[str, Any]) -> None:
    async with coder() as here:
        answer = await asked(here, body, path)
    assert here.service.loaded.tokenizer.decode(here.request.prompt_tokens) == PROMPT
    assert (here.request.max_new_tokens, here.request.stop) == (64, tuple(ENDS))
    if path == "/v1/completions":
        assert answer.json()["choices"][0]["text"] == "xy"
    else:
        lines = map(json.loads, answer.text.splitlines())
        assert "".join(line["response"] for line in lines) == "xy"


@pytest.mark.parametrize("name", ["coder-0.5b", "coder:0.5b", "Coder:0.5B", "coder-0.5b:latest"])
async def test_continue_writes_a_size_behind_a_colon(name: str) -> None:
    async with coder(unknown_model="refuse") as here:
        here.service.info = replace(INFO, name="coder-0.5b")
        await asked(here, CONTINUE | {"model": name}, "/api/generate")
        for wrong in ("coder:1.5b", "coder", "coder-0.5b-latest"):
            answer = await here.client.post("/api/generate", json=CONTINUE | {"model": wrong})
            assert answer.status_code == 404


async def test_tokens_that_a_prompt_spells_are_tokens() -> None:
    tokenizer = Tokenizer(published.qwen2_coder())
    form = next(form for form in FORMS if form.before in PROMPT)
    encoded = tokenizer.encode(PROMPT)
    for mark in (form.before, form.behind, form.gap):
        assert encoded.count(tokenizer.token(mark)) == 1
