"""What opens a workspace and what checks a change: the dev container, the workflow, the lock."""

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.stack.support import ROOT, read_yaml, run, write_programs

WORKFLOW_TEXT = (ROOT / ".github/workflows/ci.yml").read_text()
WORKFLOW: dict[str, Any] = read_yaml(".github/workflows/ci.yml")
JOBS: dict[str, dict[str, Any]] = WORKFLOW["jobs"]


def commands(job: str) -> str:
    """All that a job runs."""
    return "\n".join(step.get("run", "") for step in JOBS[job]["steps"])


# -- the workflow ------------------------------------------------------------------------------


@pytest.mark.parametrize("job", JOBS)
def test_a_job_is_pinned_bounded_allowed_only_to_read_and_calls_what_exists(job: str) -> None:
    used = [step["uses"] for step in JOBS[job]["steps"] if "uses" in step]
    assert used
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)
        assert re.search(rf"{re.escape(action)} # v\d+\.\d+\.\d+$", WORKFLOW_TEXT, re.MULTILINE)
    assert JOBS[job]["timeout-minutes"] <= 60
    assert "permissions" not in JOBS[job]
    assert WORKFLOW["permissions"] == {"contents": "read"}
    for path in re.findall(r"(?:^|\s)((?:scripts|tests|api|loadtest)/[\w./-]+)", commands(job)):
        assert (ROOT / path).exists(), path
    for target in re.findall(r"make (\w+)", commands(job)):
        assert f"\n{target}: ;" in (ROOT / "Makefile").read_text()


def test_the_jobs_together_do_what_the_one_command_does() -> None:
    everything = "\n".join(map(commands, JOBS))
    check = (ROOT / "scripts/check").read_text()
    parts = re.findall(r"^    (\w+)\) ", check, re.MULTILINE)
    assert "e2e" in parts
    for part in set(parts) - {"speed"}:  # shared runners are too uneven for a gate
        assert f"scripts/check {part}" in everything, part


def test_dependabot_looks_into_folders_that_exist() -> None:
    for entry in read_yaml(".github/dependabot.yml")["updates"]:
        for folder in entry.get("directories", [entry.get("directory")]):
            assert (ROOT / folder.lstrip("/")).is_dir()


def test_the_lock_has_hashes_and_what_the_project_asks_for() -> None:
    text = (ROOT / "api/requirements.lock").read_text()
    pins = {}
    for pin in re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]:
        name, version = re.match(r"([\w.-]+)==([^\s;]+)", pin).groups()  # type: ignore[union-attr]
        pins[name.lower().replace("_", "-")] = version
        assert "--hash=sha256:" in pin, pin
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, project["dependencies"]):
        pin = pins[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(pin), requirement
        # A version that was never tested is not allowed: of 0.x, each x may break what is called.
        (bound,) = (one.version for one in requirement.specifier if one.operator in (">=", "=="))
        tested, least = Version(pin).release, Version(bound).release
        assert tested[: 1 if tested[0] else 2] == least[: 1 if tested[0] else 2], requirement


# -- the dev container -------------------------------------------------------------------------


def commented_json(path: str) -> dict[str, Any]:
    """An object from a file of VS Code, with lines that are comments."""
    text = (ROOT / path).read_text()
    read: dict[str, Any] = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))
    return read


def dev_container() -> dict[str, Any]:
    return commented_json(".devcontainer/devcontainer.json")


def test_suggestions_are_set_up_as_the_page_says_and_their_extension_is_not_installed() -> None:
    editor = dev_container()["customizations"]["vscode"]
    (extension,) = commented_json(".vscode/extensions.json")["recommendations"]
    assert extension not in editor["extensions"]
    page = (ROOT / "docs/editors.md").read_text()
    assert f"`{extension}`" in page
    own = {name: value for name, value in editor["settings"].items() if name.startswith("llama-")}
    (block,) = re.findall(r"```jsonc\n(\{\n  \"llama-vscode.*?\})\n```", page, flags=re.DOTALL)
    assert own == json.loads(block)
    ports = dev_container()["portsAttributes"]
    assert ports[own["llama-vscode.endpoint"].rpartition(":")[2]]["label"] == "API"


def test_the_workspace_forwards_the_ports_of_the_stack_and_calls_what_exists() -> None:
    config = dev_container()
    services = read_yaml("compose.yaml")["services"].values()
    published = {int(port.rpartition(":")[2]) for one in services for port in one["ports"]}
    assert set(config["forwardPorts"]) == published == set(map(int, config["portsAttributes"]))
    (feature,) = config["features"]
    folder = ROOT / ".devcontainer" / feature
    entrypoint = Path(json.loads((folder / "devcontainer-feature.json").read_text())["entrypoint"])
    assert f"install -D -t {entrypoint.parent} " in (folder / "install.sh").read_text()
    programs = [folder / name for name in (entrypoint.name, "nest-cgroups", "install.sh")]
    for command in ("updateContentCommand", "postStartCommand"):
        shell, path = config[command].split()
        assert shell == "bash"
        programs.append(ROOT / path)
    for program in programs:
        assert os.access(program, os.X_OK), program
    for page in config["customizations"]["codespaces"]["openFiles"]:
        assert (ROOT / page).exists()


@pytest.mark.parametrize(
    ("resolver", "options"),
    [
        ("nameserver 168.63.129.16\nsearch x.bx.Internal.cloudapp.net\n", ["--dns=168.63.129.16"]),
        ("nameserver 192.0.2.1\n", []),
    ],
)
def test_the_engine_is_started_again_until_it_answers(
    resolver: str, options: list[str], tmp_path: Path
) -> None:
    """With stubs for what it calls: the first dockerd dies, the second answers."""
    calls, engine = tmp_path / "calls", tmp_path / "engine"
    (tmp_path / "resolv.conf").write_text(resolver)
    programs = {
        "start": (ROOT / ".devcontainer/docker-engine/start")
        .read_text()
        .replace("/etc/resolv.conf", f"{tmp_path}/resolv.conf")
        .replace("/var/log/", f"{tmp_path}/")
        .replace("rm -f /run/", f"rm -f {tmp_path}/run/"),
        "nest-cgroups": f"#!/bin/sh\necho nest-cgroups >>{calls}\n",
        "iptables": "#!/bin/sh\nexit 0\n",
        "dockerd": f"""#!/bin/sh
echo dockerd "$@" >>{calls}
[ "$(grep -c dockerd {calls})" -gt 1 ] || exit 1
touch {engine}
exec sleep 60
""",
        "docker": f"#!/bin/sh\ntest -e {engine}\n",
    }
    write_programs(tmp_path, **programs)
    started = run(
        *(tmp_path / "start", "sh", "-c", "kill $(pgrep -P $$); echo the workspace goes on"),
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert started.stdout == "the workspace goes on\n", started.stderr
    dockerd = " ".join(["dockerd", *options])
    assert calls.read_text().splitlines() == ["nest-cgroups", dockerd, dockerd]
    assert "try 1 of 5" in (tmp_path / "docker-engine.log").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts take root")
def test_a_hierarchy_that_is_not_mounted_is_mounted() -> None:
    """cgroup v1, in a mount namespace of its own. tests/vm/run has the rest, and cgroup v2."""
    script = ROOT / ".devcontainer/docker-engine/nest-cgroups"
    program = f"""
        mountpoint -q /sys/fs/cgroup/memory && umount /sys/fs/cgroup/memory || exit 125
        {script} && test -e /sys/fs/cgroup/memory/memory.limit_in_bytes && {script} || exit 1
        grep -c ' /sys/fs/cgroup/memory ' /proc/mounts
    """
    done = run("unshare", "--mount", "sh", "-c", program)
    if done.returncode == 125:
        pytest.skip(f"no cgroup v1 to unmount here: {done.stderr.strip()}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")  # mounted, and once


@pytest.mark.parametrize("status", [0, 1, 3, 4])
def test_a_workspace_shows_its_commands_whatever_comes_of_the_swap(
    status: int, tmp_path: Path
) -> None:
    files = {
        ".devcontainer/post-start": (ROOT / ".devcontainer/post-start").read_text(),
        "swap-setup.sh": f"#!/bin/sh\nexit {status}\n",
        "bin/sudo": '#!/bin/sh\nshift\nexec "$@"\n',  # if the user is not root
    }
    write_programs(tmp_path, **files)
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = run("bash", tmp_path / ".devcontainer" / "post-start", env=env)
    assert done.returncode == 0, done.stderr
    assert "make up" in done.stdout
    assert ("4 GB" in done.stdout) == (status != 0)


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        ("", ""),
        ("scripts/venv", "The Python tools are missing: `make load` installs them."),
        ("scripts/up", "Not all images are here: `make up` gets them."),
        ("scripts/venv scripts/up", "Not all images are here: `make up` gets them."),
    ],
)
def test_a_workspace_opens_whatever_could_not_be_downloaded(
    failing: str, said: str, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    program = "#!/bin/sh\necho ${{0##*/}} $* >>{calls}\nexit {status}\n"
    files = {
        name: program.format(calls=calls, status=int(name in failing.split()))
        for name in ("scripts/venv", "scripts/up", "bin/docker")
    }
    files[".devcontainer/update-content"] = (ROOT / ".devcontainer/update-content").read_text()
    write_programs(tmp_path, **files)
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = run("bash", tmp_path / ".devcontainer" / "update-content", env=env)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert calls.read_text().splitlines() == ["venv dev load", "docker info", "up --images"]
    assert "--images" in (ROOT / "scripts" / "up").read_text()
