"""What Locust's page refuses, and which host gets the API's key: pages of strangers try both."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from specops.request import DRAFTERS
from tests.loopback import HOST, Handler, listening
from tests.stack.forwarding import ENVIRONMENT, NAME
from tests.stack.support import tool
from tests.stack.test_load_page import form_of, load_page, post, stats
from tests.stack.test_load_test import StandIn, locust_command
from tests.waiting import PATIENCE, wait

KEY = "the-first"
STRANGE = {
    "a page of another site": {"origin": "https://evil.example", "sec-fetch-site": "cross-site"},
    "an older browser": {"origin": "https://evil.example"},
    "a file": {"origin": "null"},
    "another port of this machine": {"origin": f"http://{HOST}:1", "sec-fetch-site": "same-site"},
    "a form without an origin": {"sec-fetch-site": "cross-site"},
}


class Elsewhere(Handler):
    """Another host that answers as an API would, and keeps what it is sent."""

    seen: list[str | None]

    def do_GET(self) -> None:
        self.seen.append(self.headers["Authorization"])
        self.reply(200, {"data": [{"id": "it"}]})

    def do_POST(self) -> None:
        self.body()
        self.seen.append(self.headers["Authorization"])
        self.reply(404, {})


def loaded(page: str, seen: list[Any]) -> bool:
    return len(seen) >= 3 and stats(page)["state"] == "stopped"


def test_a_stranger_gets_neither_the_key_nor_the_load(tmp_path: Path) -> None:
    if tool("locust") is None:
        pytest.skip("Locust is not installed (extra `load`)")
    api, elsewhere = StandIn(key=KEY), type("Seeing", (Elsewhere,), {"seen": []})
    with listening(api.handler()) as port, listening(elsewhere) as other:
        target, evil = f"http://{HOST}:{port}", f"http://{HOST}:{other}"
        command = [word for word in locust_command(target) if word != "--headless"]
        keys = ("--api-key", f"alice:{KEY},second", "--web-host", HOST, "--web-port", "PORT")
        with load_page(target, tmp_path / "log", *command, *keys) as page, ExitStack() as stack:
            _, form = form_of(page)
            stranger = stack.enter_context(httpx.Client(base_url=page, timeout=PATIENCE))
            for headers in STRANGE.values():
                for path in ("swarm", "stop", "stats/reset", "user"):
                    answer = stranger.post(path, data=form, headers=headers)
                    assert answer.status_code == 403, (path, headers)
                read = stranger.get("stats/requests", headers=headers)
                assert not [name for name in read.headers if name.startswith("access-control-")]
            rebound = stranger.get("stats/requests", headers={"host": "evil.example:8089"})
            assert (rebound.status_code, "LOAD_ALLOWED_HOSTS" in rebound.text) == (403, True)
            assert stranger.post("user", json={"host": evil}).status_code == 403
            for field in ("api_key", "report", "html_file", "logfile"):
                refused = post(page, "swarm", form | {field: str(tmp_path / "mine")})
                assert refused["message"] == f"The page has no field {field!r}"
            assert api.asked == []
            assert elsewhere.seen == []  # type: ignore[attr-defined]

            own = {"origin": page, "sec-fetch-site": "same-origin"}
            got = elsewhere.seen  # type: ignore[attr-defined]
            # A person may load another host, but it gets no key; the stand-in insists on it.
            for host, seen in ((evil, got), (target, api.asked)):
                start = form | {"number_of_requests": 3, "host": host}
                begun = httpx.post(f"{page}/swarm", data=start, headers=own, timeout=PATIENCE)
                assert begun.json()["success"], begun.text
                wait(f"a load of {host}", partial(loaded, page, seen))
            assert set(got) == {None}


def request(method: str = "POST", path: str = "/swarm", **headers: str) -> dict[str, Any]:
    named = {f"HTTP_{name.upper()}": value for name, value in headers.items()}
    return {"REQUEST_METHOD": method, "PATH_INFO": path, **named}


@pytest.mark.parametrize(
    ("host", "origin", "passes"),
    [
        ("127.0.0.1:8089", "http://127.0.0.1:8089", True),
        ("[::1]:8089", "http://[::1]:8089", True),
        ("locust:8089", "http://locust:8089", True),
        ("load.lan", "https://load.lan", True),
        ("127.0.0.1:8089", None, True),  # no browser
        ("load.example.org", "https://load.example.org", False),  # not allowed as a name
        ("127.0.0.1:8089", "http://localhost:8089", False),
        (f"{NAME}-8089.app.github.dev", "http://localhost:8089", True),
        (f"{NAME}-8089.app.github.dev", "https://localhost:8089", True),
        (f"{NAME}-8089.app.github.dev", "http://localhost:3000", False),
        (f"{NAME}-8089.app.github.dev", "https://evil.example", False),
        (f"{NAME}-8089.app.github.dev.evil.example", None, False),
        ("other-8089.app.github.dev", "http://localhost:8089", False),
    ],
)
def test_the_page_answers_its_own_origin(
    host: str, origin: str | None, passes: bool, load: SimpleNamespace
) -> None:
    guard = load.access.Guard(None, "", ENVIRONMENT)
    headers = {"host": host} | ({"origin": origin} if origin else {})
    assert (guard.refusal(request(**headers)) == "") is passes
    named = load.access.Guard(None, "load.example.org", {})
    assert named.refusal(request("GET", host="Load.Example.org.:80")) == ""


def test_the_key_is_for_the_host_of_the_start(load: SimpleNamespace) -> None:
    access = load.access.Access("alice:secret,other", "http://api:8000")
    assert access.header("http://api:8000/") == {"Authorization": "Bearer secret"}
    for host in ("http://api:8000@evil.example", "http://api:80", "https://api:8000", "", None):
        assert access.header(host) == {}
    assert "start Locust with --host http://x" in access.advice("http://x")
    assert load.access.Access("secret", None).header("http://api:8000") == {}


def test_a_load_test_can_ask_for_every_drafter(load: SimpleNamespace) -> None:
    assert set(load.options.DRAFTERS) == {"default", *DRAFTERS, "none"}
