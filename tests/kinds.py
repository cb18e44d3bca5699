"""Services of each kind of preset, started as `make up` starts them.

The default model is the real one. Draft model, draft head and MTP block are tiny ones of
real architectures, with random weights and a chat template. No log may have an error in it.
tests/e2e serves two of these kinds in containers.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.serving import server
from tests.checkpoints import make_llama_checkpoint
from tests.eagle_heads import LAYERS, write_head
from tests.loopback import HOST
from tests.mtp_blocks import make_checkpoint
from tests.waiting import PATIENCE

_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_SHAPE: dict[str, Any] = {"vocab": 320, "context": 2048, "seed": 1}


def chats(target: Path) -> dict[str, str]:
    """Give a checkpoint a chat template; return the settings that serve it."""
    file = target / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"chat_template": _TEMPLATE}
    file.write_text(json.dumps(settings))
    return {"SPECOPS_TARGET": str(target), "SPECOPS_QUANT": "int8-32"}


def _default(folder: Path) -> dict[str, str]:
    return {}


def _draft_model(folder: Path) -> dict[str, str]:
    shape = {**_SHAPE, "heads": 4, "kv_heads": 2, "tie": True}
    target = make_llama_checkpoint(folder / "target", hidden=256, layers=2, ffn=384, **shape)
    draft = make_llama_checkpoint(folder / "draft", hidden=128, layers=1, ffn=256, **shape)
    return chats(target) | {"SPECOPS_DRAFT": str(draft)}


def _draft_head(folder: Path) -> dict[str, str]:
    target = make_llama_checkpoint(folder / "target", layers=LAYERS, **_SHAPE)
    return chats(target) | {"SPECOPS_DRAFT": str(write_head(folder / "head", target=target))}


def _mtp_block(folder: Path) -> dict[str, str]:
    return chats(make_checkpoint(folder / "target", with_states=True, **_SHAPE))


KINDS = {  # what makes the models, and the first of their drafters
    "default model": (_default, "suffix"),
    "draft model": (_draft_model, "draft"),
    "draft head": (_draft_head, "head"),
    "MTP block": (_mtp_block, "head"),
}


def require_kind(url: str, kind: str, key: str = "none") -> None:
    """Check that the service has the drafter of a kind of preset."""
    headers = {"authorization": f"Bearer {key}"}
    (model,) = httpx.get(f"{url}/v1/models", headers=headers, timeout=PATIENCE).json()["data"]
    assert model["drafters"][0] == KINDS[kind][1], f"{model['id']} is no {kind}"


def require_no_error(log: Iterable[dict[str, Any]]) -> None:
    """Check the lines of a service's log."""
    wrong = [line for line in log if line["level"] in {"error", "critical"}]
    assert wrong == [], wrong


@contextmanager
def running(folder: Path, kind: str = "default model", **variables: str) -> Iterator[str]:
    """Serve a kind of preset; yield the address. An error in the service's log fails the test."""
    own = {"SPECOPS_CACHE_DIR": str(folder / "cache"), **KINDS[kind][0](folder), **variables}
    log = folder / "log"
    with server.serving(own, log=log) as served:
        url = f"http://{HOST}:{served.port}"
        require_kind(url, kind, variables.get("SPECOPS_API_KEYS", "none"))
        yield url
    require_no_error(map(json.loads, log.read_text(encoding="utf-8").splitlines()))
