"""Request and response bodies, apart from HTTP (their errors as a client sees them: test_app)."""

from __future__ import annotations

from dataclasses import fields

import pytest
from pydantic import ValidationError

from specops.http.schemas.generate import Details, GenerateRequest, GenerateResponse, stream_event
from specops.request import GenerationRequest, GenerationStats, SamplingParams
from tests.fakes import STATS, output

REQUEST = GenerationRequest(
    request_id="id",
    prompt_tokens=(1,),
    max_new_tokens=8,
    drafter="draft",
    k_draft=3,
    adaptive=True,
)


def test_prompt_is_all_that_is_needed() -> None:
    request = GenerateRequest.model_validate({"prompt": ""})
    assert request.max_new_tokens == 50
    assert request.sampling == SamplingParams()
    assert request.stops == ()
    assert request.model_dump(include={"stream", "details", "ignore_eos"}) == {
        "stream": False,
        "details": False,
        "ignore_eos": False,
    }


@pytest.mark.parametrize(("given", "expected"), [("a", ("a",)), (["a", "b"], ("a", "b")), ([], ())])
def test_stop_is_one_string_or_several(given: object, expected: tuple[str, ...]) -> None:
    assert GenerateRequest.model_validate({"prompt": "", "stop": given}).stops == expected


@pytest.mark.parametrize(
    "bounds",
    [
        {"temperature": 2, "top_p": 1, "seed": (1 << 63) - 1},
        {"temperature": 0, "top_p": 1e-9, "seed": 0, "top_k": 0, "k_draft": 0},
        {"max_new_tokens": 1, "stop": ["x" * 256] * 4},
    ],
)
def test_values_at_the_bounds_are_taken(bounds: dict[str, object]) -> None:
    GenerateRequest.model_validate({"prompt": "a"} | bounds)


@pytest.mark.parametrize("text", ["\ud800", "ok\udfff"])
@pytest.mark.parametrize("field", ["prompt", "stop"])
def test_half_a_surrogate_pair_is_no_text(field: str, text: str) -> None:
    with pytest.raises(ValidationError, match="half a surrogate pair"):
        GenerateRequest.model_validate({"prompt": "a"} | {field: text})


def test_details_carry_every_statistic() -> None:
    details = Details.of(STATS, REQUEST).model_dump()
    assert {item.name for item in fields(GenerationStats)} <= set(details)
    assert (details["drafter"], details["k_draft"], details["adaptive"]) == ("draft", 3, True)


def test_figures_without_a_step_are_zero_and_serialise() -> None:
    details = Details.of(GenerationStats(), REQUEST)
    assert details.tokens_per_jump == details.mean_acceptance_length == 0
    assert "NaN" not in details.model_dump_json()


def test_promised_fields_of_the_answer_keep_their_names() -> None:
    promised = {"generated_text", "tokens_per_second", "avg_tokens_per_jump", "latency_ms"}
    assert promised <= set(GenerateResponse.model_json_schema()["required"])


def test_stream_event_holds_tokens_of_unfinished_characters() -> None:
    event = stream_event(output("", "é", origin="suffix"))
    assert event["text"] == "é"
    assert event["tokens"] == [
        {"id": 0, "text": "", "origin": "suffix"},
        {"id": 1, "text": "é", "origin": "suffix"},
    ]
