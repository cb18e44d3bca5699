"""Editors that write the model's tokens for gaps themselves: what Zed and Continue send."""

import json
from dataclasses import replace
from typing import Any

import pytest

from specops.text.fill_in import FORMS
from specops.text.tokenizer import Tokenizer
from tests.fakes import INFO
from tests.http.test_llama_server import asked, coder
from tests.text import published_tokenizers as published

pytestmark = pytest.mark.anyio
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
