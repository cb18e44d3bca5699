"""The model that a client asks for by name: there is one."""

from __future__ import annotations

from importlib.metadata import version

from specops.engine.engine import Engine
from specops.http.errors import ApiError
from specops.http.state import Context

LATEST = ":latest"  # the tag that Ollama's clients write behind a name without one
_VERSION = version("specops")


def fingerprint(engine: Engine) -> str:
    """Return what identifies the output: with the same fingerprint, a seed gives the same text."""
    info = engine.info
    return f"specops-{_VERSION}-{info.name}-{info.quant}-{info.threads}"


def tagged(name: str) -> str:
    """Return the model's name as Ollama lists it."""
    return name if ":" in name else name + LATEST


def matches(name: str, engine: Engine) -> bool:
    """Return whether a client means this model: the case and Ollama's tags are its own.

    Ollama's clients write `:latest` behind a name, and `:` for the hyphen before a size. Plug-ins
    for llama-server, which serves one model, send an empty name.
    """
    own, asked = engine.info.name.casefold(), name.casefold()
    return asked in ("", own, own + LATEST) or asked.replace(":", "-") == own


def check_model(ctx: Context, name: str, *, exact: bool = False) -> Engine:
    """Return the engine of the model that the client asks for.

    Clients of other servers send names of these: the one model answers, unless the settings refuse
    that, and a header of the answer names it.

    Args:
        ctx: of the HTTP request.
        name: as the client sent it; empty: any.
        exact: the question is about this model, and another one is no answer.

    Raises:
        NotReady: see `AsyncEngine.engine`.
        ApiError: this server has another model.
    """
    engine = ctx.engine
    ctx.served = engine.info.name
    refuses = exact or ctx.settings.unknown_model == "refuse"
    if refuses and not matches(name, engine):
        raise ApiError(
            404,
            ctx.protocol.unknown_model_message.format(
                requested=name[:64], own=engine.info.name, tagged=tagged(engine.info.name)
            ),
            code="model_not_found",
            param="model",
        )
    return engine
