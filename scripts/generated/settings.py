"""Writes the settings into .env.example, docs/settings.md and compose.yaml."""

from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from specops.config import PREFIX, Number, Settings

ROOT = Path(__file__).resolve().parents[2]
ENV_EXAMPLE = ROOT / ".env.example"
PAGE = ROOT / "docs" / "settings.md"
COMPOSE = ROOT / "compose.yaml"
IN_CONTAINER = {"SPECOPS_HOST", "SPECOPS_PORT", "SPECOPS_MODELS_DIR", "SPECOPS_CACHE_DIR"}

HEADER = """\
# Settings of the stack: copy this file to .env and uncomment what you change. Docker Compose and
# `make up` read .env. The values here are the defaults, which an empty value means, too.

"""

# Variables that huggingface_hub reads in the service's process: name, default, meaning.
HUB = (
    ("HF_TOKEN", "", "token for private and gated models on the hub"),
    ("HF_ENDPOINT", "", "address of the hub; empty: the public one"),
    ("HF_HUB_OFFLINE", "", "1: download nothing, use what is in SPECOPS_CACHE_DIR"),
)

# Variables that OpenTelemetry's SDK reads there, among others that its documentation lists.
OTEL = (
    (
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "",
        "address for traces, such as `http://jaeger:4318`; empty: no traces",
    ),
    (
        "OTEL_EXPORTER_OTLP_HEADERS",
        "",
        "headers to send with traces, such as `authorization=Bearer%20KEY`",
    ),
    ("OTEL_SERVICE_NAME", "specops", "name of the service in traces"),
    (
        "OTEL_RESOURCE_ATTRIBUTES",
        "",
        "its further attributes, such as `deployment.environment.name=lab`",
    ),
    (
        "OTEL_TRACES_SAMPLER",
        "parentbased_always_on",
        "which requests to trace if the client's `traceparent` does not decide",
    ),
    (
        "OTEL_TRACES_SAMPLER_ARG",
        "",
        "share of requests to trace with `parentbased_traceidratio`, 0 to 1",
    ),
)
LIBRARIES = (*HUB, *OTEL)

# Variables for compose.yaml and scripts/, not for the service: name, default, meaning.
STACK = (
    ("PROMETHEUS_PORT", "9090", "port of Prometheus on this machine"),
    ("GRAFANA_PORT", "3000", "port of Grafana on this machine (Docker)"),
    ("JAEGER_PORT", "16686", "port of Jaeger's page on this machine (Docker, profile `traces`)"),
    ("LOCUST_PORT", "8089", "port of Locust's page on this machine (Docker)"),
    ("GRAFANA_ADMIN_PASSWORD", "", "password of Grafana's `admin`; empty: a random one each start"),
    ("REPLICAS", "1", "replicas that `make up` starts; several run behind the gateway"),
    ("REPLICA_MEMORY", "4g", "memory of each replica, if there are several (Docker)"),
    (
        "GATEWAY_GRACE_PERIOD",
        "310s",
        "time that the gateway has to stop; longer than SPECOPS_REQUEST_TIMEOUT (Docker)",
    ),
    ("GATEWAY_CLIENT_RATE", "200", "maximum requests per second of one address (with replicas)"),
    (
        "STOP_GRACE_PERIOD",
        "40s",
        "time that the API has to stop; longer than SPECOPS_DRAIN_TIMEOUT (Docker)",
    ),
    ("PYTHON_IMAGE", "python:3.11-slim", "base image of the images built here (Docker)"),
    ("TARGET_URL", "", "API for `make load`; empty: port SPECOPS_PORT of this machine"),
    ("LOAD_SHAPE", "users", "shape of load tests"),
)


def default_of(item: Field[Any]) -> str:
    """A setting's default in the form for .env."""
    value = item.default
    if isinstance(value, Path):
        for base, name in ((ROOT, "."), (Path.home(), "~")):
            if value.is_relative_to(base):
                return f"{name}/{value.relative_to(base)}"
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def meaning(item: Field[Any]) -> str:
    """A setting's help text, with the range of a number."""
    takes = item.metadata["parse"]
    bounds = f" ({takes.low:,} to {takes.high:,})" if isinstance(takes, Number) else ""
    return f"{item.metadata['help']}{bounds}"


def service_rows() -> list[tuple[str, str, str]]:
    """Name, default and meaning of every setting of the service."""
    return [
        (PREFIX + item.name.upper(), default_of(item), meaning(item)) for item in fields(Settings)
    ]


def env_example() -> str:
    """The text of .env.example."""
    rows = [*service_rows(), *LIBRARIES, *STACK]
    return HEADER + "\n".join(
        f"# {meaning}\n#{name}={default}\n" for name, default, meaning in rows
    )


def table(rows: list[tuple[str, str, str]]) -> list[str]:
    """A line for each setting."""
    return [
        "| variable | default | meaning |",
        "|---|---|---|",
        *(
            f"| `{name}` | {f'`{default}`' if default else ''} | {meaning} |"
            for name, default, meaning in rows
        ),
    ]


def files() -> dict[Path, str]:
    """The text of .env.example by its path."""
    return {ENV_EXAMPLE: env_example()}


def parts() -> dict[Path, dict[str, list[str]]]:
    """The tables of docs/settings.md, and the settings that compose.yaml passes to the container.

    Those are all settings but the ones that only the container decides.
    """
    names = [name for name, _, _ in (*service_rows(), *LIBRARIES) if name not in IN_CONTAINER]
    return {
        PAGE: {"settings": table(service_rows()), "stack": table([*LIBRARIES, *STACK])},
        COMPOSE: {"settings": [f"      {name}: ${{{name}:-}}" for name in names]},
    }
