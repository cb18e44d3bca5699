"""POST /generate, Spec-Ops' native endpoint: continue or answer a prompt."""

import time
from typing import Literal, Self

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from specops.engine.engine import Engine
from specops.http.answering.prompt import Conversation, Tokens, encode
from specops.http.answering.schema import (
    STRICT,
    Integer,
    MostTokens,
    SeededOptions,
    Text,
    sampling_field,
)
from specops.http.answering.submit import Prepared, generate
from specops.http.answering.writer import FOUND_IN, Generation, Step, Writer, token_events
from specops.http.errors import EVENTS, GENERATING, error_responses
from specops.http.protocol import Prompt, Protocol
from specops.http.sse import DONE, event
from specops.http.state import Ctx
from specops.request import GenerationRequest, GenerationStats
from specops.text.chat_template import question


class GenerateRequest(SeededOptions):
    """A prompt to continue."""

    model_config = ConfigDict(
        **STRICT, json_schema_extra={"examples": [{"prompt": "def main(", "max_new_tokens": 50}]}
    )

    limit_field = "max_new_tokens"

    prompt: Text = Field(description="the text to continue; may be empty")
    system: Text | None = Field(
        None,
        description="system message, which makes the prompt a question for the chat template; "
        "empty: the model's, if it has one",
    )
    max_new_tokens: MostTokens = Field(
        50, description="maximum tokens of the answer; -1 and -2: as many as the server allows"
    )
    temperature: float = sampling_field("temperature", "0: always the likeliest token", 0.0)
    seed: Integer = Field(
        None,
        ge=0,
        le=(1 << 63) - 1,
        description="same seed, same output, with any drafter and under any load",
    )
    details: bool = Field(False, description="add `details` to the answer")

    @property
    def limit(self) -> int | None:
        """Maximum tokens of the answer; None: as many as the server allows."""
        return self.max_new_tokens if self.max_new_tokens > 0 else None


class SourceDetails(BaseModel):
    """Counts of the draft tokens of one source."""

    verified_per_position: list[int] = Field(
        description="item i: number of drafts whose token i + 1 was verified"
    )
    accepted_per_position: list[int] = Field(
        description="item i: number of those that were accepted"
    )


class Details(BaseModel):
    """A request's cost, and its draft tokens' figures."""

    prompt_tokens: int
    cached_prompt_tokens: int = Field(description="tokens of the prompt from the cache")
    generated_tokens: int
    sequence_steps: int = Field(description="decode and verify passes of the target")
    drafts: int = Field(description="passes with at least one draft token")
    draft_misses: int = Field(description="passes for which the drafter proposed nothing")
    draft_tokens: int = Field(description="draft tokens verified")
    accepted_tokens: int = Field(description="draft tokens accepted")
    accepted_per_position: list[int] = Field(
        description="item i: number of drafts whose token i + 1 was accepted"
    )
    sources: dict[str, SourceDetails] = Field(
        description="the same counts by source: a drafter, or the grammar"
    )
    accepted_found_in: dict[str, int] = Field(description=FOUND_IN)
    queue_seconds: float = Field(description="from arrival to a slot")
    prefill_seconds: float = Field(description="from leaving the queue to the first token")
    decode_seconds: float = Field(description="from the first token to the last")
    tokens_per_jump: float = Field(
        description="tokens after the first, per pass; passes without a draft count"
    )
    mean_acceptance_length: float = Field(
        description="1 + accepted tokens per draft; passes without a draft do not count"
    )
    draft_length: float = Field(description="draft tokens per pass; passes without count as 0")
    estimated_speedup: float = Field(
        description="speed relative to plain decoding, by the cost model"
    )
    acceptance: dict[str, list[float]] = Field(
        description="by source: how often token i + 1 was accepted where those before it were"
    )
    preemptions: int = Field(
        description="how often the request lost its KV blocks and was computed again"
    )
    drafter: str = Field(description="the drafter that was used")
    k_draft: int = Field(description="the limit that applied")
    adaptive: bool = Field(description="whether the controller chose fewer")

    @classmethod
    def of(cls, stats: GenerationStats, request: GenerationRequest) -> Self:
        """Build from the engine's figures and the request."""
        figures = {name: getattr(stats, name) for name in cls.model_fields if hasattr(stats, name)}
        acceptance = {name: source.acceptance for name, source in stats.sources.items()}
        used = {name: getattr(request, name) for name in ("drafter", "k_draft", "adaptive")}
        renamed = {"tokens_per_jump": stats.tokens_per_pass, "acceptance": acceptance}
        return cls.model_validate({**figures, **used, **renamed}, from_attributes=True)


class GenerateResponse(BaseModel):
    """The generated text, and its cost."""

    generated_text: str = Field(description="the answer, without the prompt")
    tokens_per_second: float = Field(
        description="tokens after the first, per second; 0 if there was only one"
    )
    avg_tokens_per_jump: float = Field(
        description="tokens after the first, per pass of the target; 0 if there was only one"
    )
    latency_ms: float = Field(description="from the request's arrival, waiting included")
    finish_reason: Literal["stop", "length"] = Field(
        description="`length`: a limit of tokens was reached"
    )
    prompt_tokens: int
    generated_tokens: int
    request_id: str = Field(description="as in `X-Request-ID` and in the log")
    details: Details | None = Field(None, description="only if the request asked for them")


_RESPONSES = EVENTS | error_responses(*GENERATING, 422)
PATH = "/generate"
router = APIRouter(tags=["generate"])
PROTOCOL = Protocol(  # FastAPI's conventions; paths of no other protocol follow them too
    router=router,
    prefixes=("",),
    prompts={PATH: Prompt("prompt", "text_completion")},
    invalid_status=422,
    id_headers=("x-request-id",),
    too_long_message="{message}",
)


@router.post(PATH, response_model=GenerateResponse, responses=_RESPONSES, name="generate")
async def continue_prompt(body: GenerateRequest, ctx: Ctx) -> Response:
    """Continue a prompt, or answer it if `system` is set.

    With `stream` the answer is a series of server-sent events: one per step with the new text and
    its tokens, then one with the fields of the plain answer, then `[DONE]`.
    """
    engine = ctx.engine
    generation = await generate(
        ctx,
        body,
        lambda: Prepared(prompts=[_encode(body, engine)], logged_prompt=body.prompt),
        renders=body.system is not None,
    )
    return await _Writer(generation, details=body.details).response(stream=body.streams)


def _encode(body: GenerateRequest, engine: Engine) -> Tokens:
    if body.system is None:
        return engine.encode(body.prompt)
    asked = Conversation(messages=question(body.prompt, body.system), source="system")
    return encode(engine, asked).tokens


class _Writer(Writer):
    exclude_none = True

    def __init__(self, generation: Generation, *, details: bool) -> None:
        super().__init__(generation)
        self._details = details

    def whole(self) -> GenerateResponse:
        (answer,) = self.generation.answers
        request, stats = answer.request, answer.stats
        return GenerateResponse(
            generated_text=answer.text,
            tokens_per_second=stats.tokens_per_second,
            avg_tokens_per_jump=stats.tokens_per_pass,
            latency_ms=(time.monotonic() - self.generation.arrival) * 1000,
            finish_reason=answer.finish_reason,
            prompt_tokens=stats.prompt_tokens,
            generated_tokens=stats.generated_tokens,
            request_id=self.generation.request_id,
            details=Details.of(stats, request) if self._details else None,
        )

    def step(self, step: Step) -> bytes:
        output = step.output
        if not output.pieces:
            return b""
        return event({"text": output.text, "tokens": token_events(output)})

    def end(self) -> bytes:
        return event(self.whole().model_dump(exclude_none=True)) + DONE
