"""What the next request of a conversation reads again, where the model keeps more than keys.

Small models with random weights (LFM2, Qwen3.5, Granite 4 h), whose convolutions and states need a
snapshot where a request is to go on behind another one's text. Their chat template is Qwen3.5's in
short: it ends prompts inside of a thought, and leaves the thoughts of earlier answers out.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from specops.config import Settings
from specops.engine.engine import Engine
from tests.checkpoints import make_checkpoint
from tests.http.real_engine import in_process

pytestmark = pytest.mark.anyio
Message = dict[str, Any]
MARKS = ("<|im_start|>", "user", "assistant", "tool", "<think>", "</think>", "<|im_end|>")
END = 319
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endfor %}
{%- set ns.users = -1 %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.users = ns.users + 1 %}{% endif %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' and message.reasoning_content and ns.users == ns.last %}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""
OPENING = 16  # most tokens of what the template writes around a message


@pytest.fixture(scope="module", params=["lfm2", "qwen3_5_text", "granitemoehybrid"])
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("turns") / "model"
    sizes = {"layers": 4, "context": 8192, "vocab": END + 1, "hidden": 128}
    make_checkpoint(folder, request.param, **sizes, config={"eos_token_id": END})
    file, about = folder / "tokenizer.json", folder / "tokenizer_config.json"
    tokenizer = Tokenizer.from_file(str(file))
    unused = range(tokenizer.get_vocab_size(), END + 1 - len(MARKS))
    tokenizer.add_tokens([f"<|unused-{at}|>" for at in unused])
    tokenizer.add_special_tokens(list(MARKS))
    assert tokenizer.token_to_id(MARKS[-1]) == END
    tokenizer.save(str(file))
    roles = {"eos_token": MARKS[-1], "chat_template": TEMPLATE}
    about.write_text(json.dumps(json.loads(about.read_text()) | roles))
    return Settings(
        target=str(folder),
        quant="int8-32",
        cache_dir=tmp_path_factory.mktemp("cache"),
        threads=1,
        slots=2,
        kv_tokens=16384,
    )


@pytest.fixture
async def chat(settings: Settings) -> AsyncIterator[Chat]:
    async with in_process(settings, Engine.load) as (_, http):
        yield Chat(http)


class Chat:
    """A client, and the tokens of its conversations."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def ask(self, messages: Sequence[Message]) -> tuple[int, int]:
        """Have an answer written; the tokens of the prompt that were computed, and all of them."""
        body = {"model": "model", "messages": messages, "max_tokens": 12, "temperature": 0}
        answer = await self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        usage: dict[str, Any] = answer.json()["usage"]
        count: int = usage["prompt_tokens"]
        return count - usage["prompt_tokens_details"]["cached_tokens"], count

    async def tokens(self, text: str) -> int:
        answer = await self.http.post("/tokenize", json={"content": text})
        return len(answer.json()["tokens"])


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": text, **fields}


def call(turn: int) -> dict[str, Any]:
    function = {"name": "find", "arguments": f'{{"n": {turn}}}'}
    return {"id": f"id{turn}", "type": "function", "function": function}


def words(count: int, first: str = "word") -> str:
    """A text of about so many tokens."""
    return " ".join([first, *(f"{number:03}" for number in range(count // 4))])


def history(tokens: int, turns: int = 4) -> list[Message]:
    """A conversation of about so many tokens that ends with an answer."""
    each = words(tokens // turns // 2)
    return [
        message
        for turn in range(turns)
        for message in (user(f"{turn} {each}"), assistant(f"Answer {turn}: {each}"))
    ]


@pytest.mark.parametrize("before", [60, 4000])
async def test_the_next_turn_reads_the_last_answer_and_its_own_message(
    chat: Chat, before: int
) -> None:
    """The thoughts of the last answer are gone, so the text parts where that answer began."""
    past = history(before, turns=1 if before < 100 else 4)
    _, count = await chat.ask([*past, user("Then?")])
    assert before / 2 < count < 2 * before
    said, new = words(40, "It is"), words(20, "And")
    computed, _ = await chat.ask([*past, user("Then?"), assistant(said), user(new)])
    assert computed <= await chat.tokens(said) + await chat.tokens(new) + OPENING


@pytest.mark.parametrize("before", [60, 4000])
@pytest.mark.parametrize("length", [4, 90, 700])
async def test_another_last_message_leaves_the_history_read(
    chat: Chat, before: int, length: int
) -> None:
    """As an edited question has it, another question to one system message, and a date in it."""
    past = history(before, turns=1 if before < 100 else 4)
    await chat.ask([*past, user(f"It is Monday, 9:41. {words(length, 'One')}")])
    other = f"It is Monday, 9:42. {words(length, 'Two')}"
    computed, _ = await chat.ask([*past, user(other)])
    assert computed <= await chat.tokens(other) + OPENING


async def test_a_text_that_parts_from_all_snapshots_costs_no_other_text_its_own(
    chat: Chat,
) -> None:
    past = history(400)
    _, count = await chat.ask([*past, user("One")])
    computed, all_of_it = await chat.ask([user("Quite another thing"), *past, user("Two")])
    assert computed == all_of_it
    computed, _ = await chat.ask([*past, user("Three")])
    assert computed <= await chat.tokens("Three") + OPENING < count


async def test_an_agents_long_loop_leaves_its_beginning_read(chat: Chat) -> None:
    """The next message of the user drops all thoughts of the loop: the text parts where it began.

    There is room for 32 snapshots of long texts, and each round of the loop takes two.
    """
    past = [*history(300), user("Find it.")]
    loop: list[Message] = []
    counts = []
    for turn in range(10, 34):
        counts.append(await chat.ask([*past, *loop]))
        loop += [
            assistant("", reasoning_content=f"thought {turn}", tool_calls=[call(turn)]),
            {"role": "tool", "content": f"result {turn}", "tool_call_id": f"id{turn}"},
        ]
    assert {computed for computed, _ in counts[1:]} == {counts[1][0]}  # each reads its round
    loop[-1] = assistant("Found.")
    computed, count = await chat.ask([*past, *loop, user("Thanks.")])
    assert computed <= count - counts[0][1] + OPENING


async def test_few_slots_keep_as_many_conversations_read(chat: Chat) -> None:
    """Each request leaves two to four snapshots; two slots serve several conversations in turn."""
    pasts = [[*history(100, turns=2), user(f"{number} is asked.")] for number in range(6)]
    pasts = [[user(f"Begin {number}."), *past] for number, past in enumerate(pasts)]
    for past in pasts:
        await chat.ask(past)
    for past in pasts:
        said, new = words(10, "It is"), words(10, "And")
        computed, _ = await chat.ask([*past, assistant(said), user(new)])
        assert computed <= await chat.tokens(said) + await chat.tokens(new) + OPENING


async def test_metrics_count_snapshots_and_their_memory(chat: Chat) -> None:
    await chat.ask([user("One")])
    await chat.ask([user("One"), assistant("Two"), user("Three")])
    page = (await chat.http.get("/metrics")).text
    values = dict(re.findall(r'specops_state_\w+{\w+="(\w+)"} (\S+)', page))
    assert float(values["taken"]) >= 3 > float(values["used"]) >= 1 > float(values["dropped"])
    assert 0 < float(values["snapshots"]) < float(values["limit"])
    assert float(values["slots"]) % 2 == 0 < float(values["slots"])  # of two


async def test_raw_prompts_have_borders_of_messages_too(chat: Chat) -> None:
    """Some clients write the template themselves."""
    past = "<|im_start|>user\nOne, please." * 8 + "<|im_end|>\n<|im_start|>user\n"
    cached = []
    for question in ("Which one would that be?", "Are there many others?"):
        body = {"model": "model", "prompt": f"{past}{question * 4}<|im_end|>\n", "max_tokens": 2}
        usage = (await chat.http.post("/v1/completions", json=body)).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0
    assert cached[1] >= await chat.tokens(past) - OPENING
