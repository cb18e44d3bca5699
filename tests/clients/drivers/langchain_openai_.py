"""LangChain with `langchain-openai`."""

from collections.abc import Iterator, Sequence
from typing import Any

from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.clients.drivers import KEY, SHORT, STRUCTURED, Form, Server, langchain_chat


def model(server: Server, max_tokens: int = SHORT) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{server.address}/v1",
        api_key=KEY,
        model=server.model,
        temperature=0,
        max_tokens=max_tokens,
        max_retries=0,
    )


def ask(server: Server, messages: list[dict[str, str]]) -> str:
    return model(server).invoke(messages).text


def stream(server: Server, question: str, max_tokens: int) -> Iterator[str]:
    return langchain_chat.stream(model(server, max_tokens), question)


def tools(server: Server, question: str) -> dict[str, Any]:
    return langchain_chat.tools(model(server), question, tool_choice="required")


def structured(server: Server, form: type[Form], question: str) -> Form:
    return langchain_chat.structured(model(server, STRUCTURED), form, question)


def embeddings(server: Server, texts: Sequence[str]) -> list[list[float]]:
    endpoint = {"base_url": f"{server.address}/v1", "api_key": KEY, "model": server.model}
    # It counts tokens of OpenAI's models, and would send these instead of texts.
    return OpenAIEmbeddings(**endpoint, check_embedding_ctx_length=False).embed_documents(
        list(texts)
    )
