"""The protocols: a module has one protocol's bodies, its endpoints and its writers of answers.

A new protocol is one more module here, and a line below. `/docs` keeps the order of the lines.
"""

from specops.http.protocol import Protocols
from specops.http.protocols import anthropic, llama_server, native, tokens
from specops.http.protocols.ollama import embeddings as ollama_embeddings
from specops.http.protocols.ollama import generation as ollama_generation
from specops.http.protocols.ollama import models as ollama_models
from specops.http.protocols.openai import chat, completions, embeddings, models, responses

PROTOCOLS = Protocols(
    native.PROTOCOL,
    chat.PROTOCOL,
    completions.PROTOCOL,
    anthropic.PROTOCOL,
    responses.PROTOCOL,
    embeddings.PROTOCOL,
    llama_server.PROTOCOL,
    ollama_generation.PROTOCOL,
    ollama_embeddings.PROTOCOL,
    ollama_models.PROTOCOL,
    tokens.PROTOCOL,
    models.PROTOCOL,
)
