"""Pydantic AI."""

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_ai import Agent, Embedder
from pydantic_ai.direct import model_request_sync
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition

from tests.clients.drivers import KEY, SHORT, STRUCTURED, Form, Server
from tests.clients.drivers.openai_chat import TOOL
from tests.clients.forms import get_weather


def provider(server: Server) -> OpenAIProvider:
    return OpenAIProvider(base_url=f"{server.address}/v1", api_key=KEY)


def model(server: Server) -> Model:
    return OpenAIChatModel(server.model, provider=provider(server))


def settings(max_tokens: int = SHORT, **more: Any) -> ModelSettings:
    return ModelSettings(temperature=0, max_tokens=max_tokens, **more)


def ask(server: Server, messages: list[dict[str, str]]) -> str:
    *earlier, last = messages
    history: list[ModelMessage] = [
        ModelRequest([UserPromptPart(item["content"])])
        if item["role"] == "user"
        else ModelResponse([TextPart(item["content"])])
        for item in earlier
    ]
    agent = Agent(model(server), model_settings=settings())
    return agent.run_sync(last["content"], message_history=history).output


def stream(server: Server, question: str, max_tokens: int) -> Iterator[str]:
    agent = Agent(model(server), model_settings=settings(max_tokens))
    with agent.run_stream_sync(question) as result:
        yield from result.stream_text(delta=True, debounce_by=None)


def tools(server: Server, question: str) -> dict[str, Any]:
    described = TOOL["function"]
    tool = ToolDefinition(
        name=described["name"],
        description=described["description"],
        parameters_json_schema=described["parameters"],
    )
    given = ModelRequestParameters(function_tools=[tool])
    messages: list[ModelMessage] = [ModelRequest([UserPromptPart(question)])]
    made = model_request_sync(
        model(server),
        messages,
        model_settings=settings(tool_choice="required"),
        model_request_parameters=given,
    )
    results = [
        ToolReturnPart(call.tool_name, get_weather(**call.args_as_dict()), call.tool_call_id)
        for call in made.tool_calls
    ]
    answer = model_request_sync(
        model(server),
        [*messages, made, ModelRequest(results)],
        model_settings=settings(tool_choice="none"),
        model_request_parameters=given,
    )
    calls = [{"name": call.tool_name, "arguments": call.args_as_dict()} for call in made.tool_calls]
    return {"calls": calls, "answer": answer.text}


def structured(server: Server, form: type[Form], question: str) -> Form:
    agent = Agent(model(server), output_type=form, model_settings=settings(STRUCTURED), retries=0)
    return agent.run_sync(question).output


def embeddings(server: Server, texts: Sequence[str]) -> list[list[float]]:
    embedder = Embedder(OpenAIEmbeddingModel(server.model, provider=provider(server)))
    return [list(item) for item in embedder.embed_documents_sync(list(texts)).embeddings]
