"""Checks the keys of the API's clients, and the key of `/metrics`."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers

from specops.config import client_keys
from specops.http.errors import ApiError

METRICS_PATH = "/metrics"
# Open even if there are keys: probes of orchestrators, and the documentation.
OPEN_PATHS = frozenset(
    {
        *("/", "/health", "/health/live"),
        *("/docs", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/openapi.json"),
    }
)


class ApiKeys:
    """The keys of the API. Without keys the API is open; without a metrics key, `/metrics` is.

    Args:
        keys: the value of `SPECOPS_API_KEYS`.
        metrics_key: the value of `SPECOPS_METRICS_KEY`. It opens only `/metrics`, as no other does.

    Attributes:
        clients: names of the clients.
    """

    def __init__(self, keys: str, metrics_key: str = "") -> None:
        # Digests have the same length, so comparing them reveals nothing about a key.
        self._clients = [(name, _digest(key)) for name, key in client_keys(keys)]
        self._metrics = [("", _digest(metrics_key))] if metrics_key else []
        self.clients = tuple(dict.fromkeys(name for name, _ in self._clients))

    def check(self, path: str, headers: Headers) -> None:
        """Check a request's key.

        Raises:
            ApiError: it has no key that opens this path.
        """
        metrics = path == METRICS_PATH
        keys = self._metrics if metrics else self._clients
        if path in OPEN_PATHS or not keys or _owner(keys, headers) is not None:
            return
        which = "the key of SPECOPS_METRICS_KEY" if metrics else "one of this server's keys"
        message = f"send {which}: Authorization: Bearer KEY"
        headers_out = {"www-authenticate": "Bearer"}
        raise ApiError(401, message, code="invalid_api_key", headers=headers_out)

    def known(self, headers: Headers) -> bool:
        """Return whether a request has a client's key, if one is needed."""
        return not self._clients or _owner(self._clients, headers) is not None

    def client(self, headers: Headers) -> str:
        """Return the client's name; empty without keys, or with a wrong one."""
        return _owner(self._clients, headers) or ""


def _owner(keys: Sequence[tuple[str, bytes]], headers: Headers) -> str | None:
    """Return the name of a request's key; the request may also have a wrong one."""
    owner = None
    for key in _sent(headers):
        sent = _digest(key)
        for name, digest in keys:
            if hmac.compare_digest(sent, digest):
                owner = name
    return owner


def _sent(headers: Headers) -> tuple[str, str]:
    """Return the keys that a client sent; Anthropic's clients send one of them, or both."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key", "").strip(), key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()
