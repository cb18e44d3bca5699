"""Access control: sends the API key to one host only, and protects Locust's page from other pages.

The page has no login. Without this, any web page in the same browser could submit its form, and
read its answers through CORS or DNS rebinding.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

# Names that no public DNS has, as in api/specops/http/security/hosts.py.
_PRIVATE = (
    *(".localhost", ".local", ".internal", ".home.arpa", ".lan"),
    *(".svc", ".svc.cluster.local"),
)
_READING = ("GET", "HEAD", "OPTIONS")
_CLASS_EDITOR = "/user"  # can give users another host
Wsgi = Callable[[Mapping[str, Any], Callable[..., Any]], Iterable[bytes]]


@dataclass(frozen=True)
class Access:
    """The API key, and the only host that gets it: the one with which Locust was started.

    Attributes:
        keys: keys as in SPECOPS_API_KEYS; the first one is used.
        host: URL of the API.
    """

    keys: str
    host: str | None

    def header(self, host: str | None) -> dict[str, str]:
        """The headers for a request to a host; empty if there is no key for it."""
        name, colon, key = self.keys.partition(",")[0].strip().partition(":")
        key = key if colon else name
        if not key or not host or host.rstrip("/") != (self.host or "").rstrip("/"):
            return {}
        return {"Authorization": f"Bearer {key}"}

    def advice(self, host: str) -> str:
        """A hint how to set the key for a host."""
        if self.keys and not self.header(host):
            return f"the key goes only to the host of the start: start Locust with --host {host}"
        return "pass it with --api-key or LOAD_API_KEY"


class Guard:
    """WSGI middleware for Locust's page that refuses requests from other origins.

    Args:
        app: Locust's application.
        allowed: host names in addition to private ones, separated by commas; `*` allows all.
        environ: environment variables, which name the GitHub Codespace if this is one.
    """

    def __init__(self, app: Wsgi, allowed: str, environ: Mapping[str, str] = os.environ) -> None:
        self._app = app
        self._names = {*allowed.lower().split(",")} - {""}
        name = environ.get("CODESPACE_NAME", "").lower()
        domain = environ.get("GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN", "").lower()
        own = rf"{re.escape(name)}-(?P<port>[0-9]+)\.{re.escape(domain)}"
        self._codespace = re.compile(own) if name and domain else None

    def __call__(self, environ: Mapping[str, Any], start_response: Callable[..., Any]) -> Any:
        """Answer a request."""

        def own_origin(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            kept = [it for it in headers if not it[0].lower().startswith("access-control-")]
            return start_response(status, kept, *rest)

        if reason := self.refusal(environ):
            start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
            return [reason.encode()]
        return self._app(environ, own_origin)

    def refusal(self, environ: Mapping[str, Any]) -> str:
        """Return why a request is refused; empty if it may pass."""
        host = str(environ.get("HTTP_HOST", "")).lower()
        name = re.sub(r":[0-9]*$", "", host).strip("[]").removesuffix(".")
        if not self._answers_to(name):
            return (
                f"This page does not answer to the name {name[:64]!r}, under which a web page could"
                f" reach it. Start Locust with --allowed-hosts or LOAD_ALLOWED_HOSTS={name[:64]}.\n"
            )
        if environ["REQUEST_METHOD"] in _READING:
            return ""
        if str(environ.get("PATH_INFO", "")).endswith(_CLASS_EDITOR):
            return "This load test has no users to edit.\n"
        origin, site = environ.get("HTTP_ORIGIN"), environ.get("HTTP_SEC_FETCH_SITE", "none")
        if site in ("same-origin", "none") and self._is_own(origin, host):
            return ""
        return "Another web page may not change the load test: use Locust's own page.\n"

    def _answers_to(self, name: str) -> bool:
        if "." not in name or name.endswith(_PRIVATE) or not self._names.isdisjoint({name, "*"}):
            return True
        if self._codespace is not None and self._codespace.fullmatch(name):
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True

    def _is_own(self, origin: str | None, host: str) -> bool:
        """Whether an origin is the page's own; programs other than browsers send none."""
        if origin is None or urlsplit(origin).netloc.lower() == host:
            return True
        found = self._codespace and self._codespace.fullmatch(host)
        # A Codespace's proxy replaces the page's origin by this.
        return bool(found) and re.sub("^https?", "", origin) == f"://localhost:{found['port']}"
