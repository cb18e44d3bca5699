"""LangChain's chat models; what `langchain_openai` and `langchain_ollama` share."""

from collections.abc import Iterator, Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool

from tests.clients.drivers import Form
from tests.clients.forms import get_weather


def stream(model: BaseChatModel, question: str) -> Iterator[str]:
    for piece in model.stream(question):
        yield piece.text


def tools(
    model: BaseChatModel, question: str, earlier: Sequence[Any] = (), **choice: str
) -> dict[str, Any]:
    messages: list[Any] = [*earlier, HumanMessage(question)]
    made = model.bind_tools([tool(get_weather)], **choice).invoke(messages)
    calls = made.tool_calls
    messages.append(made)
    messages += [
        ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"]) for call in calls
    ]
    if choice:
        answer = model.bind_tools([tool(get_weather)], tool_choice="none").invoke(messages)
    else:
        answer = model.invoke(messages)
    ran = [{"name": call["name"], "arguments": call["args"]} for call in calls]
    return {"calls": ran, "answer": answer.text}


def structured(model: BaseChatModel, form: type[Form], question: str) -> Form:
    return model.with_structured_output(form).invoke(question)  # type: ignore[return-value]
