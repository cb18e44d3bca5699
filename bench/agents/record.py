"""`python -m bench.agents.record NAME PROGRAM`: record an agent's requests to this service.

The program is the agent's own, from its npm package. It runs in a folder of its own against this
service's API on a port of the loopback interface, with a dummy key, and without telemetry where it
has a switch for that. Behind the API a script plays the model: it calls the agent's tool to read a
file, and then answers. The agent does one task, a second in the same session, and one in another;
opencode makes a plan before, and carries it out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import uvicorn

from bench.agents.recorded import FOLDER, HOME, Recording, save
from bench.tools.report import progress
from specops.config import Settings
from specops.http.app import create_app
from specops.request import FinishReason, GenerationRequest
from specops.text.chat_template import ChatTemplate
from tests.fakes import FakeHandle, FakeService, output
from tests.text.tools.scripts import BY_NAME, TEMPLATES, written

_HOST, _FILE = "127.0.0.1", "hello.py"
_SECONDS = 120.0
# Claude Code fills this field of its first line in for its maker's hosts. Versions 2.1.36 to
# 2.1.177 did for all hosts, with another value for each request [anthropics/claude-code 68900].
_CCH = re.compile(r"(x-anthropic-billing-header:[^\n]*?;)(?: cch=\w*;)?$", re.MULTILINE)
_AUTHOR = {
    "PATH": os.environ["PATH"],
    **{f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class Agent:
    """How an agent's program is run, and which of its tools reads a file.

    Attributes:
        path: where it sends its requests.
        reads: name of the tool, and the argument for the file.
        begin: its arguments for a task in a new session.
        go_on: the same in the last session.
        plan: the same for a plan, if it has a mode for that.
        environment: its settings; `{url}` is the service.
        files: written below its home folder.
    """

    path: str
    reads: tuple[str, str]
    begin: tuple[str, ...]
    go_on: tuple[str, ...]
    environment: dict[str, str]
    files: dict[str, str]
    plan: tuple[str, ...] = ()

    def runs(self) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Yield the arguments of each run, and what the first requests of the run are."""
        yield (*self.begin, "What does hello.py do?"), ("first", "after a tool")
        yield (*self.go_on, "And how could it be shorter?"), ("next task",)
        if self.plan:
            yield (*self.plan, "Plan a change."), ("plan",)
            yield (*self.go_on, "Carry it out."), ("after the plan",)
        yield (*self.begin, "Explain the code."), ("other session",)


_OPENCODE = {
    "autoupdate": False,
    "share": "disabled",
    "model": "local/fake",
    "small_model": "local/fake",
    "provider": {
        "local": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "local",
            "options": {"baseURL": "{url}/v1", "apiKey": "dummy"},
            "models": {"fake": {"name": "fake", "limit": {"context": 65536, "output": 4096}}},
        }
    },
}
_CODEX = """model = "fake"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "DUMMY_KEY"
[analytics]
enabled = false
"""
AGENTS = {
    "claude-code": Agent(
        "/v1/messages",
        ("Read", "file_path"),
        ("--model", "fake", "-p"),
        ("--model", "fake", "--continue", "-p"),
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_API_KEY": "dummy",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_AUTOUPDATER": "1",
        },
        {},
    ),
    "opencode": Agent(
        "/v1/chat/completions",
        ("read", "filePath"),
        ("run",),
        ("run", "--continue"),
        {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        {".config/opencode/opencode.json": json.dumps(_OPENCODE)},
        ("run", "--continue", "--agent", "plan"),
    ),
    "codex": Agent(
        "/v1/responses",
        ("exec_command", "cmd"),
        ("exec", "--skip-git-repo-check"),
        ("exec", "resume", "--last", "--skip-git-repo-check"),
        {"DUMMY_KEY": "dummy"},
        {".codex/config.toml": _CODEX},
    ),
}


class _Model(FakeService):
    """Plays the model: one call of a tool in each session, then answers."""

    def __init__(self, call: tuple[str, dict[str, Any]]) -> None:
        super().__init__()
        self.loaded.chat_template = ChatTemplate(TEMPLATES["hermes"], {})
        self._call = call

    def submit(self, *requests: GenerationRequest) -> FakeHandle:
        prompt = bytes(requests[0].prompt_tokens).decode()
        calls = f'"{self._call[0]}"' in prompt and "<|im_start|>tool" not in prompt
        text = written(BY_NAME["hermes"], [self._call]) if calls else "It says hello."
        self.answer = (output(text), output(finish=FinishReason.STOP))
        return super().submit(*requests)


@contextmanager
def _serving(model: _Model, path: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve the API; yield its address, and the bodies of the requests to `path`, as they come."""
    bodies: list[dict[str, Any]] = []
    app = create_app(Settings(), model)  # type: ignore[arg-type]

    async def recording(scope: MutableMapping[str, Any], receive: Receive, send: Any) -> None:
        body = b""

        async def reading() -> MutableMapping[str, Any]:
            nonlocal body
            message = await receive()
            body += message.get("body", b"")
            if message["type"] == "http.request" and not message.get("more_body"):
                bodies.append(json.loads(body))
            return message

        await app(scope, reading if scope.get("path") == path else receive, send)

    with socket.create_server((_HOST, 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(recording, log_level="error"))
        thread = Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            yield f"http://{_HOST}:{listener.getsockname()[1]}", bodies
        finally:
            server.should_exit = True
            thread.join()


def record(name: str, program: Path) -> Recording:
    """Have an agent do its tasks; return its requests.

    Raises:
        RuntimeError: it sent others than were expected.
    """
    agent = AGENTS[name]
    with tempfile.TemporaryDirectory() as folder:
        home, project = Path(folder), Path(folder) / "project"
        project.mkdir()
        (project / _FILE).write_text('print("hello")\n', encoding="utf-8")
        for arguments in (("init",), ("add", _FILE), ("commit", "-m", "Say hello")):
            _run(["git", *arguments], project, _AUTHOR)
        tool, argument = agent.reads
        value = f"cat {_FILE}" if argument == "cmd" else str(project / _FILE)
        with _serving(_Model((tool, {argument: value})), agent.path) as (url, bodies):
            for file, text in agent.files.items():
                (home / file).parent.mkdir(parents=True, exist_ok=True)
                (home / file).write_text(text.replace("{url}", url), encoding="utf-8")
            environment = {
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "TERM": "dumb",
                **{key: text.replace("{url}", url) for key, text in agent.environment.items()},
            }
            requests: dict[str, dict[str, Any]] = {}
            for arguments, kinds in agent.runs():
                progress(f"{name}: {arguments[-1]}")
                bodies.clear()
                _run([str(program), *arguments], project, environment)
                sent = [body for body in bodies if body.get("tools")]  # others only make titles
                if len(sent) < len(kinds):
                    raise RuntimeError(f"{name} sent {len(sent)} requests for {kinds}")
                for kind, body in zip(kinds, sent, strict=False):
                    text = json.dumps(body).replace(folder, HOME)
                    requests[kind] = _with_cch(json.loads(text), len(requests))
            told = _run([str(program), "--version"], project, environment)
            version = re.findall(r"\d[\d.]+", told)[0]
    return Recording(f"{name} {version}", agent.path, requests)


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout.strip()


def _with_cch(body: dict[str, Any], number: int) -> dict[str, Any]:
    """Give the first line of Claude Code's system prompt a value of this request's own."""
    system = body.get("system")
    if isinstance(system, list):
        text = system[0]["text"]
        system[0]["text"] = _CCH.sub(rf"\1 cch={0xEB6C6 + 0x1111 * number:05x};", text)
    return body


def main() -> None:
    """Record an agent and write its file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=AGENTS)
    parser.add_argument("program", type=Path, help="the agent's executable")
    options = parser.parse_args()
    recording = record(options.name, options.program.resolve())
    save(FOLDER / f"{options.name}.json", recording)
    progress(f"wrote {FOLDER / options.name}.json: {', '.join(recording.requests)}")


if __name__ == "__main__":
    main()
