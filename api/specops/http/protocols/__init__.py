"""The protocols: one module has a protocol's bodies, endpoints and response writers.

To add a protocol, add a module here and a line below. `/docs` keeps the lines' order.
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
