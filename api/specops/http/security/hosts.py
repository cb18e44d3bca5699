"""Decides under which names the service answers, and which pages in a browser may call it.

By DNS rebinding, a stranger's page reaches services that only its reader can reach: the page's name
starts to resolve to a private address, and the browser treats both as one origin. The page needs a
name in the public DNS, and a service without a key. So without keys, the service answers only to
addresses and to names that are never in the public DNS; a setting adds others.

A page of another origin may call the service if it comes from this machine, or from a program that
runs on it (an editor, a desktop app), as with Ollama; a setting adds more.
"""

import logging
import os
import re
import socket
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from specops.http.errors import ApiError

# Orchestrators and Prometheus request these, under names of their choice; without side effects.
ANY_HOST_PATHS = frozenset({"/health", "/health/live", "/metrics"})
# Names that are never in the public DNS: RFC 6761, 6762, 8375, ICANN's `.internal`, Kubernetes, and
# routers' names for their network.
_PRIVATE = (
    *(".localhost", ".local", ".internal", ".home.arpa", ".lan"),
    *(".svc", ".svc.cluster.local"),
)
_MAX_NAMES = 64  # in the log
_MAX_NAME = 64  # in a message
_NOT_IN_HOST = re.compile(r"[\s\"#/<>?@\\^`{|}]")
_HOST = re.compile(r"(?:\[(?P<six>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(?::[0-9]*)?")
_LOCAL = ("localhost", "*.localhost", "127.0.0.1", "[::1]", "0.0.0.0")  # noqa: S104 # nosec B104
_LOCAL_ORIGINS = (
    *(f"{scheme}://{host}{port}" for scheme in ("http", "https") for host in _LOCAL
      for port in ("", ":*")),
    *("app://*", "file://*", "tauri://*", "vscode-webview://*", "vscode-file://*"),
)  # fmt: skip
_READABLE = (  # headers of answers, for pages of other origins
    *("retry-after", "x-request-id", "request-id", "x-ignored-fields"),
    *("x-served-model", "x-queue-position", "x-estimated-wait"),
)
log = logging.getLogger(__name__)


def host_name(header: str) -> str | None:
    """Return the name in a `Host` header; None if it has none.

    `Example.org.:8000` has the name `example.org`, `[::1]:8000` has `::1`.
    """
    match = _HOST.fullmatch(header.strip().lower())
    if match is None:
        return None
    return match["six"] or (match["name"] or "").removesuffix(".")


class Hosts:
    """The names under which a service without keys answers.

    Args:
        allowed: names in addition to those that are always accepted, separated by commas;
            `*.example.org` stands for all names below `example.org`, `*` for all names.
        environ: has the name of a GitHub Codespace, if this is one.
    """

    def __init__(self, allowed: str, environ: Mapping[str, str] = os.environ) -> None:
        self._names = {socket.gethostname().lower()}
        self._suffixes = list(_PRIVATE)
        for name in filter(None, allowed.split(",")):
            if name.startswith("*"):
                self._suffixes.append(name[1:])
            else:
                self._names.add(name)
        codespace = environ.get("CODESPACE_NAME", "").lower()
        domain = environ.get("GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN", "").lower()
        own = rf"{re.escape(codespace)}-[0-9]+\.{re.escape(domain)}"
        self._codespace = re.compile(own) if codespace and domain else None
        self._logged: set[str] = set()

    def answers_to(self, host: str) -> bool:
        """Return whether a request with this `Host` header may pass."""
        name = host_name(host)
        if name is None:
            return "" in self._suffixes
        if "." not in name and ":" not in name:
            return True  # no name of the public DNS
        if name in self._names or any(name.endswith(suffix) for suffix in self._suffixes):
            return True
        if self._codespace is not None and self._codespace.fullmatch(name):
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True

    def check(self, path: str, headers: Headers) -> None:
        """Check a request's host name.

        Raises:
            ApiError: its Host is not a valid name, or not a name of the service.
        """
        host = headers.get("host", "")
        if _NOT_IN_HOST.search(host):
            message = f"{host[:_MAX_NAME]!r} is not a valid host name"
            raise ApiError(400, message, code="invalid_host")
        if path in ANY_HOST_PATHS or self.answers_to(host):
            return
        name = (host_name(host) or host)[:_MAX_NAME]
        if name not in self._logged and len(self._logged) < _MAX_NAMES:
            self._logged.add(name)
            log.warning(
                "refused a request for a host name that is not allowed; add the name to "
                "SPECOPS_ALLOWED_HOSTS, or set SPECOPS_API_KEYS",
                extra={"fields": {"host": name}},
            )
        raise ApiError(
            403,
            f"this server does not answer to the name {name!r}. It has no API key, and a web page "
            f"could reach it under such a name. Start it with SPECOPS_ALLOWED_HOSTS={name}, or "
            "with SPECOPS_API_KEYS",
            code="host_not_allowed",
        )


class Cors(CORSMiddleware):
    """Starlette's, but a preflight never fails: a refused page only lacks the header.

    Clients would take a failed preflight for a server that is down.
    """

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return the answer to a preflight request."""
        if self.is_allowed_origin(request_headers["origin"]):
            return super().preflight_response(request_headers)
        return Response(headers={"vary": "Origin"})


def cors(allowed: str) -> dict[str, Any]:
    """Return the arguments of starlette's `CORSMiddleware`.

    Args:
        allowed: origins in addition to the local ones, separated by commas; `*` stands for any
            characters except a slash, or alone for all origins.
    """
    origins = [*_LOCAL_ORIGINS, *filter(None, allowed.split(","))]
    patterns = (re.escape(origin).replace(r"\*", "[^/@]*") for origin in origins)
    return {
        "allow_origin_regex": ".*" if "*" in origins else "|".join(patterns),
        "allow_methods": ("GET", "POST", "DELETE", "OPTIONS"),
        "allow_headers": ["*"],  # the answer repeats those that the page asks for
        "allow_private_network": True,  # for the same origins
        "expose_headers": _READABLE,
        "max_age": 600,
    }
