"""DSPy; the model's prefix chooses the protocol."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import dspy

from tests.clients.drivers import KEY, SHORT, STRUCTURED, Form, Server
from tests.clients.forms import get_weather

QUESTION_ANSWER = dspy.Signature(
    {
        "question": (str, dspy.InputField()),
        "answer": (str, dspy.OutputField(desc="The answer in one sentence.")),
    },
    "Answer the question.",
)


class Model(dspy.LM):
    """DSPy's list of models tells it what they can do, and it has none of your own."""

    supported_params = frozenset({"response_format", "tools", "tool_choice"})
    supports_function_calling = True
    supports_response_schema = True


def endpoint(server: Server) -> dict[str, Any]:
    return {"api_base": f"{server.address}/v1", "api_key": KEY}


def model(server: Server, max_tokens: int = SHORT) -> Model:
    there = endpoint(server) | {"num_retries": 0, "cache": False}
    return Model(server.model, **there, temperature=0, max_tokens=max_tokens)


def ask(server: Server, messages: list[dict[str, str]]) -> str:
    return model(server)(messages=messages)[0]


async def stream(server: Server, question: str, max_tokens: int) -> AsyncIterator[str]:
    program = dspy.streamify(
        dspy.Predict(QUESTION_ANSWER), stream_listeners=[dspy.streaming.StreamListener("answer")]
    )
    with dspy.context(lm=model(server, max_tokens), adapter=dspy.JSONAdapter()):
        async for part in program(question=question):
            if isinstance(part, dspy.streaming.StreamResponse):
                yield part.chunk


def tools(server: Server, question: str) -> dict[str, Any]:
    lm, tool = model(server), dspy.Tool(get_weather)
    ask = dspy.Predict("question: str, tools: list[dspy.Tool] -> calls: dspy.ToolCalls")
    with dspy.context(lm=lm, adapter=dspy.ChatAdapter(use_native_function_calling=True)):
        made = ask(question=question, tools=[tool], config={"tool_choice": "required"}).calls
        results = " ".join(get_weather(**call.args) for call in made.tool_calls)
        answer = dspy.Predict("question, results -> answer")(question=question, results=results)
    calls = [{"name": call.name, "arguments": call.args} for call in made.tool_calls]
    return {"calls": calls, "answer": answer.answer}


def structured(server: Server, form: type[Form], question: str) -> Form:
    fields = {"question": (str, dspy.InputField()), "answer": (form, dspy.OutputField())}
    with dspy.context(lm=model(server, STRUCTURED), adapter=dspy.JSONAdapter()):
        return dspy.Predict(dspy.Signature(fields))(question=question).answer


def embeddings(server: Server, texts: Sequence[str]) -> list[list[float]]:
    embedder = dspy.Embedder(server.model, caching=False, **endpoint(server))
    return [[float(number) for number in vector] for vector in embedder(list(texts))]
