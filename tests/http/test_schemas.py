"""Request and response bodies, apart from HTTP (their errors as a client sees them: test_app)."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from specops.http.schemas.generate import Details, GenerateRequest, stream_event
from specops.request import GenerationRequest, GenerationStats
from tests.fakes import output


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


@pytest.mark.parametrize(("field", "text"), [("prompt", "\ud800"), ("stop", "ok\udfff")])
def test_half_a_surrogate_pair_is_no_text(field: str, text: str) -> None:
    with pytest.raises(ValidationError, match="half a surrogate pair"):
        GenerateRequest.model_validate({"prompt": "a"} | {field: text})


def test_figures_without_a_step_are_zero_and_serialise() -> None:
    request = GenerationRequest(request_id="id", prompt_tokens=(1,), max_new_tokens=8)
    details = Details.of(GenerationStats(), request)
    assert details.tokens_per_jump == details.mean_acceptance_length == 0
    assert "NaN" not in details.model_dump_json()


def test_stream_event_holds_tokens_of_unfinished_characters() -> None:
    event = stream_event(output("", "é", origin="suffix"))
    assert event["text"] == "é"
    assert event["tokens"] == [
        {"id": 0, "text": "", "origin": "suffix"},
        {"id": 1, "text": "é", "origin": "suffix"},
    ]
