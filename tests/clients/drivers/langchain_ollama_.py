"""LangChain with `langchain-ollama`."""

from collections.abc import Iterator, Sequence
from typing import Any

from langchain_ollama import ChatOllama, OllamaEmbeddings

from tests.clients.drivers import SHORT, STRUCTURED, Form, Server, langchain_chat
from tests.clients.forms import earlier_calls


def model(server: Server, max_tokens: int = SHORT) -> ChatOllama:
    return ChatOllama(
        base_url=server.address, model=server.model, temperature=0, num_predict=max_tokens
    )


def ask(server: Server, messages: list[dict[str, str]]) -> str:
    return model(server).invoke(messages).text


def stream(server: Server, question: str, max_tokens: int) -> Iterator[str]:
    return langchain_chat.stream(model(server, max_tokens), question)


def tools(server: Server, question: str) -> dict[str, Any]:
    return langchain_chat.tools(model(server), question, earlier_calls(text=True))


def structured(server: Server, form: type[Form], question: str) -> Form:
    return langchain_chat.structured(model(server, STRUCTURED), form, question)


def embeddings(server: Server, texts: Sequence[str]) -> list[list[float]]:
    return OllamaEmbeddings(base_url=server.address, model=server.model).embed_documents(
        list(texts)
    )
