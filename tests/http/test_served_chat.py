"""The chat model itself, where `make up` has fetched it: the first question of a client that sends
no system message has an answer, whatever protocol it speaks."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from anthropic import Anthropic
from jsonschema import Draft202012Validator
from ollama import Client as Ollama
from openai import OpenAI

from specops.config import Settings
from specops.presets import CHAT, chat_model
from tests.loopback import HOST
from tests.overload import serving
from tests.waiting import PATIENCE

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not chat_model().is_file(), reason="no chat model: scripts/chat_model.py"),
]
QUESTION = "What is the capital of France?"
ASK: list[Any] = [{"role": "user", "content": QUESTION}]
SEEDS = range(5)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    cache = str(Settings().cache_dir)  # the user's: to convert the model again takes half a minute
    own = {"SPECOPS_MODEL": CHAT, "SPECOPS_CONTEXT": "512", "SPECOPS_CACHE_DIR": cache}
    with serving(tmp_path_factory.mktemp("chat"), **own) as (port, _):
        yield f"http://{HOST}:{port}"


def get(address: str, path: str) -> Any:
    return httpx.get(address + path, timeout=PATIENCE).raise_for_status().json()


def post(address: str, path: str, body: Any) -> Any:
    return httpx.post(address + path, json=body, timeout=PATIENCE).raise_for_status().json()


def test_the_capital_of_france_is_paris_in_every_protocol(address: str) -> None:
    one: dict[str, Any] = {"model": CHAT, "max_tokens": 16}
    said = set()
    with (
        OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as openai,
        Anthropic(base_url=address, api_key="none", max_retries=0) as anthropic,
        Ollama(address) as ollama,
    ):
        for seed in SEEDS:  # at the model's own temperature, which the clients leave open
            more: dict[str, Any] = {"extra_body": {"seed": seed}}
            whole = openai.chat.completions.create(messages=ASK, seed=seed, **one)
            said.add(whole.choices[0].message.content)
            response = openai.responses.create(
                model=CHAT, input=QUESTION, max_output_tokens=16, **more
            )
            said.add(response.output_text)
            message: Any = anthropic.messages.create(messages=ASK, **one, **more)
            said.add(message.content[0].text)
            options = {"num_predict": 16, "seed": seed}
            said.add(ollama.chat(CHAT, ASK, options=options).message.content)
            said.add(ollama.generate(CHAT, QUESTION, options=options).response)
    own = {"prompt": QUESTION, "system": "", "max_new_tokens": 16}
    said.add(post(address, "/generate", own)["generated_text"])
    assert said == {"The capital of France is Paris."}


def test_the_documentations_example_runs(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    exec(code.replace("http://127.0.0.1:8000", address), {})  # noqa: S102 - our own documentation
    sent = capsys.readouterr().out
    assert "CompletionUsage(" in sent
    assert "draft_n_accepted" in sent


def test_only_a_conversation_without_a_system_message_gets_an_empty_one(address: str) -> None:
    (model,) = get(address, "/v1/models")["data"]
    assert (model["id"], model["system"]) == (CHAT, "")
    for text in ("", "Be brief."):
        messages = [{"role": "system", "content": text}, *ASK] if text else ASK
        answer = post(address, "/apply-template", {"messages": messages})
        begun = f"<|im_start|>system\n{text}<|im_end|>\n<|im_start|>user\nWhat is"
        assert answer["prompt"].startswith(begun)


def test_what_clients_read_of_the_model_is_the_models(address: str) -> None:
    def ask(path: str, **body: Any) -> Any:
        return post(address, path, body)

    props = get(address, "/props")
    drawn = props["default_generation_settings"]
    assert (drawn["n_ctx"], drawn["params"]["temperature"]) == (512, 0.2)  # the file's own
    assert (props["model_alias"], "<|im_start|>" in props["chat_template"]) == (CHAT, True)
    text = "Où est né<|im_end|> 東京\n"
    pieces = ask("/tokenize", content=text, with_pieces=True)["tokens"]
    spelled = [item["piece"] for item in pieces]
    assert (
        b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in spelled)
        == text.encode()
    )
    assert "<|im_end|>" in spelled
    tokens = [item["id"] for item in pieces]
    assert ask("/detokenize", tokens=tokens)["content"] == text

    (listed,), (loaded,) = (get(address, f"/api/{name}")["models"] for name in ("tags", "ps"))
    shown = ask("/api/show", model=listed["model"])
    facts = {name.rpartition(".")[2]: value for name, value in shown["model_info"].items()}
    assert (facts["parameter_count"] // 10**6, facts["vocab_size"]) == (134, 49152)
    assert facts["context_length"] == loaded["context_length"] == 512
    assert listed["size"] == loaded["size"] > 50e6
    assert shown["template"] == props["chat_template"]
    assert {"completion", "tools", "embedding"} <= set(shown["capabilities"])
    asked = ["a cat", "the cat", "an interest rate", "a cat"]
    vectors = np.array(ask("/api/embed", model=CHAT, input=asked)["embeddings"])
    assert vectors.shape == (4, facts["embedding_length"])
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    near, far, same = vectors[1:] @ vectors[0]
    assert far < near < same == pytest.approx(1)
    plain = ask("/api/embeddings", model=CHAT, prompt="a cat")["embedding"]
    assert np.allclose(plain / np.linalg.norm(plain), vectors[0], atol=1e-5)


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def person(
    address: str, schema: dict[str, Any], seed: int, **more: Any
) -> tuple[str | None, dict[str, Any]]:
    """Ask for a person; returns why the answer ended, and its fields if it is whole."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    question: list[Any] = [{"role": "user", "content": "Invent a person. Answer in JSON."}]
    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as openai:
        answer = openai.chat.completions.create(
            model=CHAT, messages=question, response_format=form, seed=seed, max_tokens=128, **more
        )
    (choice,) = answer.choices
    text = choice.message.content or ""
    return choice.finish_reason, json.loads(text) if choice.finish_reason == "stop" else {}


def test_a_form_of_two_fields_has_these_and_ends(address: str) -> None:
    for seed in range(12):
        finish, fields = person(address, PERSON, seed)
        assert (finish, list(fields)) == ("stop", ["name", "age"])
        assert Draft202012Validator(PERSON).is_valid(fields)


def test_a_form_that_asks_for_more_fields_may_have_them(address: str) -> None:
    form = PERSON | {"additionalProperties": True}
    found = [person(address, form, seed, temperature=0.8) for seed in range(4)]
    assert any(finish == "length" or len(fields) > 2 for finish, fields in found)
