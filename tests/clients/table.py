"""The clients of `make clients`, what is tried with each, and the cells that cannot be green.

`docs/api.md` shows this table. The versions are those that the files beside it pin.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from tests.clients.forms import FORMS

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "api.md"
# What is tried, in this order, and what it is called.
FEATURES = {
    "chat": "chat",
    "stream": "stream",
    "tools": "tools",
    **{form: form for form in FORMS},
    "embeddings": "embeddings",
    "too_long": "too long",
    "cancel": "cancel",
}
PAGE_FEATURES = ("models", "chat", "stop", "regenerate")
ANSWERED = "answered"


@dataclass(frozen=True)
class Lack:
    """A cell that is red.

    Attributes:
        why: who refuses the same request, or has no such thing.
        error: a part of the error that the client reports; empty: there is nothing to try.
    """

    why: str
    error: str = ""


@dataclass(frozen=True, eq=False)
class Client:
    """A client, or one of the protocols that it speaks.

    Attributes:
        name: the package, and what of it is used.
        kind: `python` or `npm`, where it comes from.
        driver: the module in `drivers`, or the name in `npm/drivers.mjs`.
        protocol: the endpoints that it talks to.
        too_long: the class of the error for a conversation that does not fit, or `ANSWERED`: the
            oldest messages are left out.
        says: what the message of that error says.
        model: how it names the model.
        lacks: the cells that are red.
    """

    name: str
    kind: str
    driver: str
    protocol: str
    too_long: str = ANSWERED
    says: str = ""
    model: str = "smollm2"
    lacks: Mapping[str, Lack] = field(default_factory=dict)

    @property
    def package(self) -> str:
        return self.name.split(" ")[0]


CHAT, RESPONSES, MESSAGES, OLLAMA = "chat", "responses", "messages", "Ollama"
FITS = "maximum context length is"
ANTHROPIC_FITS = "prompt is too long"
NO_EMBEDDINGS = {"embeddings": Lack("Anthropic's API has no embeddings")}
_INSTRUCTOR = Lack("Instructor is for structured output: it has none of its own")
INSTRUCTOR = {
    "tools": _INSTRUCTOR,
    "embeddings": _INSTRUCTOR,
    "cancel": Lack("Instructor reads a stream to its end before it returns"),
}
STRICT_RECORDS = {
    "records": Lack(
        "the package asks for `strict` and refuses a record itself, as OpenAI does",
        "must set `additionalProperties: false`",
    )
}
ZOD_SETS = {"sets": Lack("zod: a set cannot be written as a schema", "Set cannot be represented")}

_WINDOW, _RETRY = "litellm.ContextWindowExceededError", "instructor.InstructorRetryException"
_BAD, _CALL = "BadRequestError", "AI_APICallError"
CLIENTS = (
    Client("openai", "python", "openai_chat", CHAT, f"openai.{_BAD}", FITS),
    Client("openai (responses)", "python", "openai_responses", RESPONSES, f"openai.{_BAD}", FITS),
    Client("anthropic", "python", "anthropic_messages", MESSAGES, f"anthropic.{_BAD}",
           ANTHROPIC_FITS, lacks=NO_EMBEDDINGS),
    Client("ollama", "python", "ollama_chat", OLLAMA, model="smollm2:latest"),
    Client("litellm (openai/)", "python", "litellm_completion", CHAT, _WINDOW, FITS,
           "openai/smollm2"),
    Client("litellm (anthropic/)", "python", "litellm_completion", MESSAGES, _WINDOW,
           ANTHROPIC_FITS, "anthropic/smollm2", NO_EMBEDDINGS),
    Client("litellm (ollama_chat/)", "python", "litellm_completion", OLLAMA,
           model="ollama_chat/smollm2"),
    Client("langchain-openai", "python", "langchain_openai_", CHAT,
           "langchain_core.ContextOverflowError", FITS),
    Client("langchain-ollama", "python", "langchain_ollama_", OLLAMA),
    Client("instructor (openai)", "python", "instructor_", CHAT, _RETRY, FITS, "openai",
           INSTRUCTOR),
    Client("instructor (anthropic)", "python", "instructor_", MESSAGES, _RETRY, ANTHROPIC_FITS,
           "anthropic", INSTRUCTOR),
    Client("pydantic-ai", "python", "pydantic_ai_", CHAT, "pydantic_ai.ModelHTTPError", FITS),
    Client("dspy", "python", "dspy_predict", CHAT, "dspy.ContextWindowExceededError",
           model="openai/smollm2"),
    Client("openai", "npm", "openai_chat", CHAT, _BAD, FITS, lacks=STRICT_RECORDS | ZOD_SETS),
    Client("openai (responses)", "npm", "openai_responses", RESPONSES, _BAD, FITS,
           lacks=STRICT_RECORDS | ZOD_SETS),
    Client("@anthropic-ai/sdk", "npm", "anthropic_messages", MESSAGES, _BAD, ANTHROPIC_FITS,
           lacks=NO_EMBEDDINGS | ZOD_SETS),
    Client("@ai-sdk/openai-compatible", "npm", "ai_openai_compatible", CHAT, _CALL, FITS,
           lacks=ZOD_SETS),
    Client("@ai-sdk/anthropic", "npm", "ai_anthropic", MESSAGES, _CALL, ANTHROPIC_FITS,
           lacks=NO_EMBEDDINGS | ZOD_SETS),
    Client("ollama", "npm", "ollama_chat", OLLAMA, model="smollm2:latest", lacks=ZOD_SETS),
)  # fmt: skip
PAGES = (
    Client("open-webui (Ollama)", "page", "webui", OLLAMA, model="smollm2:latest"),
    Client("open-webui (OpenAI)", "page", "webui", CHAT),
)


def features(client: Client) -> tuple[str, ...]:
    """What is tried with a client, in order."""
    return PAGE_FEATURES if client.kind == "page" else tuple(FEATURES)


def versions() -> dict[tuple[str, str], str]:
    """The pinned version of each package, by its kind and name."""
    found = {}
    for kind, file in (("python", "python.txt"), ("page", "page.txt")):
        for name, version in re.findall(
            r"^([\w.-]+)(?:\[.*\])?==(\S+)", (HERE / file).read_text(), re.M
        ):
            found[kind, name.removesuffix("-slim")] = version
    packages = json.loads((HERE / "npm" / "package.json").read_text())["dependencies"]
    return found | {("npm", name): version for name, version in packages.items()}


def rows() -> list[str]:
    """Return the lines that docs/api.md shows: a table, and why a client lacks something."""
    pinned, reasons = versions(), list[str]()
    lines = ["| client | by | too long | lacks |", "|---|---|---|---|"]
    for (package, kind), group in groupby(CLIENTS, lambda client: (client.package, client.kind)):
        cells: tuple[list[str], ...] = ([], [], [])
        for client in group:
            error = client.too_long.rpartition(".")[2]
            cells[0].append(client.protocol)
            cells[1].append(error if error == ANSWERED else f"`{error}`")
            for name, lack in client.lacks.items():
                if lack.why not in reasons:
                    reasons.append(lack.why)
                cells[2].append(f"{name} ({reasons.index(lack.why) + 1})")
        where = "PyPI" if kind == "python" else "npm"
        texts = (", ".join(dict.fromkeys(cell)) for cell in cells)
        lines.append(f"| {package} {pinned[kind, package]}, {where} | {' | '.join(texts)} |")
    lines += ["", *(f"{number}. {why}" for number, why in enumerate(reasons, 1)), ""]
    version = pinned["page", "open-webui"]
    names = " and ".join(client.protocol for client in PAGES)
    lines.append(
        f"Open WebUI {version} lists the model, chats, stops an answer and regenerates one, "
        f"by {names}."
    )
    return lines


def parts() -> dict[Path, dict[str, list[str]]]:
    """The table for the page that shows it."""
    return {PAGE: {"clients": rows()}}
