"""The commands of the project: short targets, clear refusals, clean ends."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from scripts import native
from tests.http.test_healthcheck import answering, state
from tests.loopback import Handler, listening
from tests.stack.support import ROOT, read_yaml, run, write_programs
from tests.stack.test_compose_file import resolved
from tests.waiting import wait

TARGETS = (
    *("up", "down", "test", "lint", "load", "bench", "check", "presets", "soak"),
    *("fuzz", "files", "clients", "suites", "train", "generate", "clean"),
)


def test_every_target_is_one_line() -> None:
    text = (ROOT / "Makefile").read_text()
    found = re.findall(r"^([a-z]+): ; @(.+)$", text, flags=re.MULTILINE)
    assert tuple(name for name, _ in found) == TARGETS
    assert "\n\t" not in text
    for _, command in found:
        assert os.access(ROOT / command.split()[0], os.X_OK), command


@pytest.mark.parametrize("python", ["/bin/false", "/no/such/python"])
def test_an_old_python_is_refused_by_name(python: str, tmp_path: Path) -> None:
    write_programs(tmp_path, **{"scripts/venv": (ROOT / "scripts" / "venv").read_text()})
    result = run(tmp_path / "scripts" / "venv", env={"PYTHON": python})
    assert result.returncode != 0
    assert "Python 3.11 or newer is needed" in result.stderr
    assert not (tmp_path / ".venv").exists()


def test_an_installation_says_what_it_is_at_and_at_the_end_what_went_wrong(tmp_path: Path) -> None:
    python = f"""#!/bin/sh
case "$*" in
"-m venv "*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
"-m pip "*)
    echo "  Building editable for specops (pyproject.toml): started"
    read -r _ <gate
    echo "ERROR: no compiler"
    exit 1
    ;;
*) exec {sys.executable} "$@" ;;
esac
"""
    files = {name: (ROOT / name).read_text() for name in ("scripts/venv", "setup.py")}
    write_programs(tmp_path, python=python, **files, **{"pyproject.toml": ""})
    os.mkfifo(gate := tmp_path / "gate")
    with (
        (output := tmp_path / "output").open("wb") as both,
        subprocess.Popen(
            [tmp_path / "scripts/venv", "load"],
            env={**os.environ, "PYTHON": str(tmp_path / "python")},
            stdout=both,
            stderr=both,
        ) as running,
    ):
        wait("what it is at", lambda: " s  Compiling the kernels\n" in output.read_text())
        gate.write_text("\n")
    assert running.returncode == 1
    assert output.read_text().endswith("ERROR: no compiler\n")
    assert not (tmp_path / ".venv/.specops-installed").exists()


# A value in .env, and what of it a setting becomes.
DOTENV = {
    "plain": "plain",
    "1 # one": "1",
    "a#b": "a#b",
    "#a": "#a",
    "  two words  ": "two words",
    "'a # b' # c": "a # b",
    '"a # b"   # c': "a # b",
    "'${A}'": "${A}",
    r"""'a\n"'""": r'a\n"',
    r'"a\n\"b\" \$c\\"': 'a\n"b" $c\\',
    r"a\n": r"a\n",
    "it's": "it's",
    "": "",
}


def test_a_value_in_dotenv_is_the_same_with_docker_and_without(tmp_path: Path) -> None:
    services = read_yaml("compose.yaml")["services"]
    names = [
        name for name, value in services["api"]["environment"].items() if f"${{{name}:-}}" == value
    ]
    lines = "".join(
        f"{'export ' * (number % 2)}{name}{'=' if number % 3 else ': '}{written}\n"
        for number, (name, written) in enumerate(zip(names, DOTENV, strict=False))
    )
    expected = dict(zip(names, DOTENV.values(), strict=False))
    (dotenv := tmp_path / ".env").write_text(lines)
    assert native.environment(dotenv, {}) == expected
    inside = resolved(tmp_path, lines)["services"]["api"]["environment"]
    found = {name: (inside[name] or "").replace("$$", "$") for name in expected}
    assert found == expected


@pytest.mark.parametrize("value", ["a$b", '"${HOME}/x"', '"open', "'open"])
def test_a_value_that_only_compose_can_read_is_named(value: str, tmp_path: Path) -> None:
    (dotenv := tmp_path / ".env").write_text(
        f"GRAFANA_ADMIN_PASSWORD=a$b\nSPECOPS_SYSTEM={value}\n"
    )
    with pytest.raises(native.StartError, match=r"^SPECOPS_SYSTEM in \.env "):
        native.environment(dotenv, {})


def test_the_environment_overrides_dotenv(tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    assert native.environment(dotenv, {"A": "1"}) == {"A": "1"}
    dotenv.write_text(
        "# SPECOPS_SLOTS=9\nSPECOPS_PORT='8001'\nSPECOPS_SLOTS=2\nSPECOPS_CACHE_DIR=~/cache\n"
        "PROMETHEUS_PORT=9099\nGRAFANA_ADMIN_PASSWORD=secret\nHF_TOKEN=mine\n"
    )
    assert native.environment(dotenv, {"SPECOPS_SLOTS": "3"}) == {
        "SPECOPS_PORT": "8001",
        "SPECOPS_SLOTS": "3",
        "SPECOPS_CACHE_DIR": str(Path.home() / "cache"),
        "PROMETHEUS_PORT": "9099",
        "HF_TOKEN": "mine",
    }


def test_replicas_have_ports_of_their_own_that_no_client_is_lent() -> None:
    ports = [address.port for address in native.free_addresses(9)]
    assert len(set(ports)) == 9
    assert all(12_000 <= port < 32_000 for port in ports)


def test_the_load_test_gets_its_variables_from_dotenv_and_the_apis_address_and_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["native.py", "--print-load"])
    for name in ("SPECOPS_HOST", "LOAD_API_KEY", "TARGET_URL", "LOAD_SHAPE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPECOPS_API_KEYS", "first,second")
    for text, expected in (
        ("SPECOPS_PORT=81", "LOAD_API_KEY=first,second TARGET_URL=http://127.0.0.1:81"),
        (
            "TARGET_URL=http://a b\nLOAD_API_KEY=own\nLOAD_SHAPE=spike",
            "TARGET_URL='http://a b' LOAD_API_KEY=own LOAD_SHAPE=spike",
        ),
    ):
        (tmp_path / ".env").write_text(text)
        assert native.main() == 0
        assert capsys.readouterr().out == f"export {expected}\n"


def test_a_load_tests_status_reaches_the_caller_and_no_report_is_named_that_was_not_written(
    tmp_path: Path,
) -> None:
    write_programs(
        tmp_path,
        **{
            "scripts/load": (ROOT / "scripts" / "load").read_text(),
            "scripts/venv": "#!/bin/sh\n",
            ".venv/bin/python": "#!/bin/sh\necho export TARGET_URL=http://api\n",
            ".venv/bin/locust": """#!/bin/sh
                for word; do
                    if [ "$last$WRITES" = --htmlyes ]; then echo it >"$word"; fi
                    last=$word
                done
                echo "locust $*"
                exit "$STATUS"
                """,
        },
    )

    def load(*words: str, status: int, writes: str) -> list[str]:
        env = {"STATUS": str(status), "WRITES": writes}
        done = run(tmp_path / "scripts" / "load", *words, env=env)
        assert done.returncode == status, done.stderr
        return done.stdout.splitlines()

    for status in (1, 2):
        (locust,) = load("-u", "2", status=status, writes="no")
        assert "--host http://api --headless" in locust
        assert locust.endswith(" -u 2")
    _, report = load(status=2, writes="yes")
    assert (tmp_path / report.removeprefix("Report: ")).read_text() == "it\n"
    page, locust = load("--shape", "spike", "--web", "-t", "9s", status=0, writes="no")
    assert page.startswith("Load test: http://127.0.0.1:8089 ")
    assert locust.endswith(" --web-port 8089 --shape spike -t 9s")
    assert "--headless" not in locust


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("SPECOPS_PORT", ["http", "0", "65536", "-1"]),
        ("PROMETHEUS_PORT", ["0"]),
        ("REPLICAS", ["some", "0", "65", "-1"]),
    ],
)
def test_a_wrong_setting_is_named(name: str, values: list[str], tmp_path: Path) -> None:
    for value in values:
        with pytest.raises(native.StartError, match=f"{name} takes a"):
            native.run(tmp_path / "state", {name: value})


def test_a_taken_port_stops_the_start_and_names_the_setting(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(native.StartError, match=rf"{port}.*SPECOPS_PORT=…"):
            native.run(tmp_path / "state", {"SPECOPS_PORT": str(port)})
    assert not (tmp_path / "state").exists()


def test_a_server_that_listens_everywhere_is_reached_on_this_machine() -> None:
    address = native.Address.read({}, "SPECOPS_PORT", 8000, "0.0.0.0")  # noqa: S104
    assert address.url == "http://127.0.0.1:8000"


def test_in_a_codespace_a_browser_gets_the_name_of_its_proxy() -> None:
    address = native.Address.read({}, "SPECOPS_PORT", 8000, "127.0.0.1")
    codespace = {
        "CODESPACE_NAME": "octocat-space",
        "GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN": "app.github.dev",
    }
    assert native.in_browser(address, codespace) == "https://octocat-space-8000.app.github.dev"
    assert native.in_browser(address, {}) == "http://127.0.0.1:8000"


def test_a_start_that_takes_long_repeats_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "SAY_SECONDS", 0)
    with answering(*[state("loading", "laying out")] * 3, state("ready")) as port:
        native.wait_ready(f"http://127.0.0.1:{port}/health", [], threading.Event())
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r" \(\d+ s\)", "", line) for line in lines] == ["laying out"] * 3


@pytest.mark.parametrize(("pages", "expected"), [(200, "/alerts"), (404, "/classic/alerts")])
def test_the_page_of_alerts_is_the_one_that_this_prometheus_has(pages: int, expected: str) -> None:
    class Prometheus(Handler):
        def do_GET(self) -> None:
            self.reply(pages, b"")

    with listening(Prometheus) as port:
        assert native.alerts_page(f"http://127.0.0.1:{port}") == expected


def test_a_second_stack_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    """It would overwrite the first stack's logs, and `make down` could not find that stack."""
    program = tmp_path / "native.py"
    program.write_text("input()")
    with subprocess.Popen([sys.executable, program], stdin=subprocess.PIPE) as first:
        (tmp_path / "native.pid").write_text(str(first.pid))
        second = run("scripts/up", "--native", env={"NATIVE_STATE": str(tmp_path)})
        first.communicate(b"\n")
    assert second.returncode == 1
    assert f"A stack is already running here (process {first.pid})" in second.stderr


def test_down_ends_containers_of_every_profile_too_and_names_what_still_runs(
    tmp_path: Path,
) -> None:
    write_programs(
        tmp_path,
        docker=f'#!/bin/sh\necho "$COMPOSE_FILE $*" >>{tmp_path}/calls\n'
        "case $* in *ps*) echo 0123456789ab ;; esac\n",
        **{"native.py": "input()", "locustfile.py": "input()"},
    )
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NATIVE_STATE": str(tmp_path)}
    with ExitStack() as stack:
        stack_of_ours, load = (
            stack.enter_context(
                subprocess.Popen([sys.executable, tmp_path / name], stdin=subprocess.PIPE)
            )
            for name in ("native.py", "locustfile.py")
        )
        (tmp_path / "native.pid").write_text(str(stack_of_ours.pid))
        ended = stack.enter_context(ThreadPoolExecutor(1)).submit(stack_of_ours.wait)
        down = run("scripts/down", env=env)
        assert down.returncode == 0, down.stderr
        assert ended.result(60) == -signal.SIGTERM
        assert load.poll() is None
        load.communicate(b"\n")
    files = "compose.yaml:deploy/compose.scale.yaml"
    assert f"{files} compose --profile * down" in (tmp_path / "calls").read_text().splitlines()
    shown = f" {load.pid} {sys.executable} {tmp_path}/locustfile.py"[:100]  # lines are cut
    assert shown in down.stdout
    assert str(stack_of_ours.pid) not in down.stdout
    assert not (tmp_path / "native.pid").exists()


def test_a_part_that_dies_is_reported_with_its_last_words(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo the disk is full; exit 7"]
    part = native.Part("The API", command, tmp_path / "log", dict(os.environ))
    part.process.wait(60)
    with pytest.raises(native.StartError, match=r"The API exited with status 7(?s:.*)disk is full"):
        part.require_alive()


def test_a_part_that_ignores_sigterm_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = tmp_path / "ready"
    command = ["sh", "-c", f"trap '' TERM; touch {ready}; while :; do sleep 0.1; done"]
    part = native.Part("Stubborn", command, tmp_path / "log", dict(os.environ))
    while not ready.exists():
        assert part.process.poll() is None
    part.stop(patience=0.2)
    assert part.process.returncode == -9
    assert "Stubborn did not stop" in capsys.readouterr().out


def test_the_readmes_commands_can_be_pasted_and_its_words_are_explained_first() -> None:
    readme = (ROOT / "README.md").read_text()
    for command in re.findall(r"^```bash\n(.*?)\n```", readme, flags=re.DOTALL | re.MULTILINE):
        assert run("bash", "-n", "-c", command).returncode == 0, command
        assert not re.search(r"\b[A-Z]{3,}\b(?!=)", command), f"a placeholder: {command}"
    for word in ("suffix lookup", "draft model", "draft head", "MTP block"):
        assert readme.index(word) == readme.index(f"**{word}**") + 2
