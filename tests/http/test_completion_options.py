"""`best_of`, `suffix`, `echo` with `logprobs`: through OpenAI's own client."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import openai
import pytest

from specops.config import Settings
from specops.request import FinishReason, Logprob, Output, Piece
from tests.fakes import STATS, FakeTokenizer, output
from tests.http.chat_clients import Clients, clients
from tests.http.real_engine import served

pytestmark = pytest.mark.anyio


def said(text: str, *values: float) -> Output:
    """A whole answer whose letters have these log-probabilities."""
    pieces = tuple(
        Piece(ord(letter), letter, "target", Logprob(value, ()))
        for letter, value in zip(text, values, strict=True)
    )
    return Output("", pieces, FinishReason.STOP, STATS)


async def drawn(here: Clients, answers: list[Output], **body: Any) -> Any:
    """Ask for completions, whose choices are told these answers."""
    ask = asyncio.create_task(here.openai.completions.create(model="fake", **body))
    handle = await here.service.submitted.get()
    assert len(handle.requests) == len(answers)
    for place, answer in enumerate(answers):
        handle.push(answer, to=place)
    return await ask


# -- best_of -------------------------------------------------------------------------------------


async def test_the_best_by_log_probability_per_token_are_returned_first() -> None:
    answers = [
        said("aaa", -1, -1, -1),
        said("b", -2),
        said("cc", -0.5, -0.5),  # the best by tokens
        said("d", -0.9),
        *(said("wxyz"[place], -float(4 - place)) for place in range(4)),
    ]
    async with clients() as here:
        found = await drawn(here, answers, prompt=["p", "q"], n=2, best_of=4, seed=7)
        requests = here.service.requests
    assert [choice.text for choice in found.choices] == ["cc", "d", "z", "y"]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert {choice.logprobs for choice in found.choices} == {None}
    assert [item.sampling.seed for item in requests] == [7, 8, 9, 10] * 2
    assert found.usage.prompt_tokens == 2
    assert found.usage.completion_tokens == 8 * STATS.generated_tokens  # all that were drawn


async def test_best_of_tells_probabilities_where_they_are_asked_for() -> None:
    async with clients() as here:
        answers = [said("a", -2), said("b", -1)]
        found = await drawn(here, answers, prompt="p", best_of=2, logprobs=1)
    (choice,) = found.choices
    assert choice.logprobs.token_logprobs == [-1]
    assert here.request.logprobs == 1


async def test_best_of_as_many_as_are_returned_costs_nothing() -> None:
    async with clients() as here:
        here.script([output("a", finish=FinishReason.STOP)])
        await here.openai.completions.create(model="fake", prompt="p", n=2, best_of=2)
    assert here.request.logprobs is None


async def test_more_answers_than_there_are_places_are_refused() -> None:
    async with clients(queue_size=1) as here:
        with pytest.raises(openai.BadRequestError, match="at most 3 answers"):
            await here.openai.completions.create(model="fake", prompt="p", best_of=4)


# -- suffix --------------------------------------------------------------------------------------


class Coder(FakeTokenizer):
    """Of a model that fills in."""

    marks = {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3, "<file_sep>": 4}  # noqa: RUF012

    def token(self, text: str) -> int | None:
        return self.marks.get(text)


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
async def test_a_gap_is_filled_in_where_the_model_can(prompt: Any) -> None:
    async with clients() as here:
        here.service.loaded.tokenizer = Coder()
        here.script([output("x", finish=FinishReason.STOP)])
        found = await here.openai.completions.create(
            model="fake", prompt=prompt, suffix="cd", stop="\n\n"
        )
    assert found.choices[0].text == "x"
    assert here.request.prompt_tokens == (1, *b"ab", 2, *b"cd", 3)
    assert here.request.stop_token_ids == (4,)
    assert here.request.stop == ("\n\n", "<file_sep>")


async def test_a_model_that_cannot_fill_in_says_so() -> None:
    async with clients() as here:
        with pytest.raises(openai.BadRequestError, match="gap") as error:
            await here.openai.completions.create(model="fake", prompt="a", suffix="b")
        assert (error.value.param, error.value.code) == ("suffix", "unsupported_parameter")
        here.script([output("x", finish=FinishReason.STOP)])
        await here.openai.completions.create(model="fake", prompt="a", suffix="")


# -- echo with logprobs --------------------------------------------------------------------------

TOLD = (None, Logprob(-0.5, ((98, -0.5),)), Logprob(-1.5, ((97, -0.25),)))


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompts_tokens_are_told_before_the_answers(stream: bool) -> None:
    first = Logprob(-2.0, ((120, -0.1),))
    answer = Output("", (Piece(121, "y", "target", first),), None, None, prompt=TOLD)
    async with clients() as here:
        here.script([answer, replace(output(finish=FinishReason.STOP))])
        found: Any = await here.openai.completions.create(
            model="fake", prompt="abc", echo=True, logprobs=1, stream=stream
        )
        parts = [part async for part in found] if stream else [found]
        assert here.request.prompt_logprobs
        await here.openai.completions.create(model="fake", prompt="abc", logprobs=1)
        assert not here.request.prompt_logprobs
    choice = next(part.choices[0] for part in parts if part.choices)
    told = choice.logprobs
    assert choice.text == "abcy"
    assert told.tokens == ["a", "b", "c", "y"]
    assert told.token_logprobs == [None, -0.5, -1.5, -2.0]
    assert told.top_logprobs == [None, {"b": -0.5}, {"a": -0.25}, {"x": -0.1}]
    assert told.text_offset == [0, 1, 2, 3]


async def test_a_text_is_scored_as_it_was_generated(tiny_settings: Settings) -> None:
    """By a real engine: bit for bit, and without a further token where none is asked for."""
    async with served(replace(tiny_settings, draft="none")) as client:
        name = (await client.models.list()).data[0].id
        ask = client.completions.create
        prompt = "def add(a, b):\n    return"
        made = await ask(model=name, prompt=prompt, max_tokens=30, temperature=0, logprobs=2)
        (written,) = made.choices
        tokens = await _tokens(client, prompt)
        whole = [*tokens, *(await _tokens(client, written.text))]
        scored = await ask(
            model=name, prompt=prompt, max_tokens=30, temperature=0, echo=True, logprobs=2
        )
        read = await ask(model=name, prompt=whole, max_tokens=0, echo=True, logprobs=2)
        again = await ask(model=name, prompt=whole, max_tokens=0, echo=True, logprobs=2, n=2)
    told = scored.choices[0].logprobs
    assert scored.choices[0].text == prompt + written.text
    assert told.token_logprobs[0] is None
    assert told.token_logprobs[len(tokens) :] == written.logprobs.token_logprobs
    assert told.top_logprobs[len(tokens) :] == written.logprobs.top_logprobs
    assert "".join(told.tokens[: len(tokens)]) == prompt
    assert told.text_offset[: len(tokens)] == [
        len("".join(told.tokens[:place])) for place in range(len(tokens))
    ]
    whole_told = read.choices[0].logprobs
    assert len(whole_told.tokens) == len(whole)
    assert whole_told.token_logprobs[: len(tokens)] == told.token_logprobs[: len(tokens)]
    assert (read.usage.completion_tokens, read.choices[0].finish_reason) == (0, "length")
    assert [choice.logprobs for choice in again.choices] == [whole_told] * 2


async def _tokens(client: openai.AsyncOpenAI, text: str) -> list[int]:
    answer: Any = await client.post(
        "http://test/tokenize", body={"content": text, "add_special": True}, cast_to=object
    )
    found: list[int] = answer["tokens"]
    return found
