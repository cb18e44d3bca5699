"""GET /v1/models: the loaded model, with the fields of OpenAI's, Anthropic's and vLLM's APIs."""

from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from specops.engine.engine import Engine
from specops.http.answering.schema import absent
from specops.http.answering.submit import check_model
from specops.http.errors import error_responses
from specops.http.protocol import Protocol
from specops.http.state import Context, Ctx

router = APIRouter(tags=["openai"])
PROTOCOL = Protocol(router=router, prefixes=("/v1/",))


class Model(BaseModel):
    """The loaded model, with the fields of OpenAI's, Anthropic's and vLLM's APIs."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int
    created_at: str = Field(description="`created`, in RFC 3339's format")
    owned_by: str = "specops"
    lifecycle: Literal["active"] = "active"
    line: None = None
    deprecated_at: None = None
    retires_at: None = None
    max_input_tokens: int = Field(description="longest prompt: one token less than the context")
    max_tokens: int = Field(description="longest answer")
    capabilities: dict[str, Any] = Field(description="in Anthropic's form")
    context_length: int = Field(description="tokens per request, prompt and output together")
    max_model_len: int = Field(description="`context_length`, by vLLM's name")
    quantization: str
    drafters: list[str]
    chat: bool = Field(description="whether the model answers messages; if not, it continues text")
    batch_invariant: bool = Field(
        description="whether output is bit-for-bit the same alone or in a batch, speculative or not"
    )
    foreign_products: list[str] = Field(
        description="graph nodes that prevent batch invariance; empty if there are none"
    )
    sampling: dict[str, float] = Field(
        description="the model's default sampling parameters, if the temperature is not 0; those "
        "not listed have the protocol's defaults"
    )
    constraints_refused: str | None = Field(
        None, exclude_if=absent, description="why schemas and grammars are refused, if they are"
    )
    system: str | None = Field(
        None,
        exclude_if=absent,
        description="default system message; missing: the template's",
    )


class ModelList(BaseModel):
    """All served models: one."""

    object: Literal["list"] = "list"
    data: list[Model]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


@router.get("/v1/models", responses=error_responses(401, 500, 503))
async def models(ctx: Ctx) -> ModelList:
    """List the loaded model."""
    name = ctx.engine.info.name
    return ModelList(data=[_model(ctx, ctx.engine)], first_id=name, last_id=name)


@router.get("/v1/models/{model:path}", responses=error_responses(401, 404, 500, 503))
async def model(model: str, ctx: Ctx) -> Model:
    """Describe the loaded model."""
    name = model or "/"  # a path cannot hold an empty name
    return _model(ctx, check_model(ctx, name, exact=True))


def _model(ctx: Context, engine: Engine) -> Model:
    info, template = engine.info, engine.chat_template
    longest, refused = info.context - 1, engine.grammars.vocabulary.refused
    return Model(
        id=info.name,
        display_name=info.name,
        created=ctx.app.started,
        created_at=datetime.fromtimestamp(ctx.app.started, UTC).isoformat(),
        max_input_tokens=longest,
        max_tokens=min(longest, ctx.settings.max_new_tokens),
        capabilities=_capabilities(
            thinks=bool(template and template.reasoning_tags), constrains=refused is None
        ),
        constraints_refused=refused,
        context_length=info.context,
        max_model_len=info.context,
        quantization=info.quant,
        drafters=list(info.drafters),
        chat=info.chat,
        batch_invariant=info.batch_invariant,
        foreign_products=list(info.ort_matmuls),
        sampling=info.sampling.specified,
        system=info.system,
    )


def _capabilities(*, thinks: bool, constrains: bool) -> dict[str, Any]:
    """Return the model's capabilities, with every key that Anthropic's API has."""

    def supported(is_so: bool, **more: bool) -> dict[str, Any]:
        inner = {name: {"supported": value} for name, value in more.items()}
        return {"supported": is_so, **inner}

    absent = ("batch", "citations", "code_execution", "context_management", "image_input")
    types = {"disabled": True, "enabled": thinks, "adaptive": thinks, "between_tools": False}
    return {
        **{name: supported(False) for name in (*absent, "pdf_input")},
        "effort": supported(
            False, **dict.fromkeys(("low", "medium", "high", "xhigh", "max"), False)
        ),
        "server_tools": supported(False, code_execution=False, web_search=False),
        "structured_outputs": supported(constrains),
        "thinking": {
            "supported": thinks,
            "types": {name: supported(value) for name, value in types.items()},
        },
    }
