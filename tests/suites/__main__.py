"""`make suites`: the tests of llama.cpp's server and of vLLM's, run against `specops serve`.

    make suites ARGS="--only vllm"                         one suite
    make suites ARGS="--only llama-server -k logit_bias"   what follows goes to pytest:
    make suites ARGS="--only llama-server unit/test_embedding.py"

The tests come as their projects publish them, in source distributions of the package index; none of
them is in this repository. They keep their licences (llama.cpp: MIT, vLLM: Apache 2.0), which lie
beside them below build/suites. Programs in `shim/` start Spec-Ops in place of the other server, and
`LOOSER` says in which points a test is less strict here. The third suite is the project's own: it
checks answers of `/v1/responses` against the types of the Open Responses specification.

What Spec-Ops does not claim is in `NAME.tsv`, one test or group of tests a line, with the reason:

- `left out`: not run, because it asks for something that is not here, or for what a large model
  writes;
- `differs`: run, and expected to fail. One that passes fails the suite: take its line out.

Every other test must pass; the exit status is 1 if one fails. The suites need a network the first
time; then they take less than 15 minutes on two cores.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts import chat_model
from specops import presets
from tests.clients import environments
from tests.suites import stories

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "suites"
# What a test says of its own server's texts and numbers: (pattern, replacement).
LOOSER = (
    # A fingerprint may name this service.
    (r'(fingerprint"?\]?)\.startswith\("b"\)', r'\1.startswith(("b", "specops"))'),
    # The first chunk of a stream may have an empty text instead of none.
    (r'(delta(?:"\]\["content"\]|\.content)) is None', r'\1 in (None, "")'),
    (r"(if choice\['delta'\]\.get\('content'\)) is not None:", r"\1:"),
    # An argument that is code ends after some letters: SmolLM2 would write on.
    (r'("The code to run in[^"]+",)', r'\1 "maxLength": 40,'),
)


@dataclass(frozen=True)
class Suite:
    """Where a suite's tests are.

    Attributes:
        shim: the plugin of pytest that starts Spec-Ops for them.
        package: the project on the package index, with its version.
        sha256: of its source distribution.
        backend: the module that would build it.
        parts: what is unpacked, from the distribution's root.
        folder: in which pytest starts.
        files: the tests, from there.
    """

    shim: str
    package: str = ""
    version: str = ""
    sha256: str = ""
    backend: str = ""
    parts: tuple[str, ...] = ()
    folder: str = "."
    files: tuple[str, ...] = ()


_LLAMA, _OPENAI = "vendor/llama.cpp", "tests/entrypoints/openai"
SUITES = {
    "llama-server": Suite(
        "llama_server",
        "llama-cpp-python",
        "0.3.36",
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        "scikit_build_core.build",
        (f"{_LLAMA}/tools/server/tests", f"{_LLAMA}/models/templates", f"{_LLAMA}/LICENSE"),
        f"{_LLAMA}/tools/server/tests",
        ("unit",),
    ),
    "vllm": Suite(
        "vllm_server",
        "vllm",
        "0.33.0",
        "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
        "setuptools.build_meta",
        ("tests/__init__.py", "tests/entrypoints", "LICENSE"),
        ".",
        (
            "tests/entrypoints/anthropic/test_messages.py",
            *(f"{_OPENAI}/chat_completion/test_{name}.py" for name in (
                *("chat", "chat_completion", "chat_echo", "chat_logit_bias_validation"),
                *("completion_with_function_calling", "extra_content_fields"),
                *("include_reasoning", "logprob_token_ids"),
            )),
            f"{_OPENAI}/completion/test_completion.py",
            f"{_OPENAI}/completion/test_prompt_validation.py",
            *(f"{_OPENAI}/responses/test_{name}.py" for name in (
                *("basic", "function_call", "simple", "structured_output"),
            )),
            f"{_OPENAI}/test_chunked_prompt.py",
            f"{_OPENAI}/test_return_token_ids.py",
            f"{_OPENAI}/test_return_tokens_as_ids.py",
            "tests/entrypoints/serve/instrumentator/test_basic.py",
            "tests/entrypoints/serve/middleware/test_optional_middleware.py",
        ),
    ),
    "open-responses": Suite("product", files=(str(HERE / "shim" / "open_responses.py"),)),
}  # fmt: skip


def download(suite: Suite, folder: Path) -> Path:
    """Return the source distribution, which pip downloads unless it is there.

    pip asks the project's build backend for its metadata, for which that would need a compiler and
    more. Without isolation pip takes the backend that its Python imports: here a module of the
    same name that writes two lines.
    """
    name = f"{suite.package.replace('-', '_')}-{suite.version}"
    path = folder / f"{name}.tar.gz"
    if path.exists():
        return path
    print(f"Downloading {suite.package} {suite.version}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        backend = Path(scratch, *suite.backend.split(".")).with_suffix(".py")
        backend.parent.mkdir()
        (backend.parent / "__init__.py").touch()
        backend.write_text(
            "from pathlib import Path\n"
            "def prepare_metadata_for_build_wheel(folder, settings=None):\n"
            f"    info = Path(folder, '{name}.dist-info')\n"
            "    info.mkdir()\n"
            f"    (info / 'METADATA').write_text('Metadata-Version: 2.1\\nName: {suite.package}\\n"
            f"Version: {suite.version}\\n')\n"
            "    return info.name\n"
        )
        pin = Path(scratch, "requirements.txt")
        pin.write_text(f"{suite.package}=={suite.version} --hash=sha256:{suite.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", ":all:", "--no-build-isolation", "--require-hashes"]
        command += ["--dest", scratch, "--requirement", str(pin)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": scratch})
        Path(scratch, path.name).rename(path)
    return path


def unpack(suite: Suite, archive: Path, target: Path) -> Path:
    """Unpack the tests, less strict where `LOOSER` says it; return the folder for pytest."""
    shutil.rmtree(target, ignore_errors=True)
    for inside, content in _files(archive):
        if any(inside == part or inside.startswith(f"{part}/") for part in suite.parts):
            path = target / inside
            path.parent.mkdir(parents=True, exist_ok=True)
            text = content
            if path.suffix == ".py":
                for pattern, looser in LOOSER:
                    text = re.sub(pattern.encode(), looser.encode(), text)
            path.write_bytes(text)
    return target / suite.folder


def _files(archive: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and (stream := tar.extractfile(member)) is not None:
                yield member.name.partition("/")[2], stream.read()


def run(name: str, arguments: list[str]) -> int:
    """Run a suite; return pytest's exit status."""
    suite, work = SUITES[name], BUILD / name
    folder = HERE
    if suite.package:
        folder = unpack(suite, download(suite, BUILD / "downloads"), work / "tests")
    (work / "logs").mkdir(parents=True, exist_ok=True)
    variables = {
        "SUITE_LIST": str(HERE / f"{name}.tsv"),
        "SUITE_WHOLE": "" if arguments else "1",
        "SUITE_WORK": str(work),
        "SUITE_MODELS": str(BUILD / "models"),
        "SUITE_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join((str(HERE / "shim"), str(folder))),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [environments.python("suites", HERE), "-m", "pytest", "-p", "expected"]
    command += ["-p", suite.shim, "-p", "no:cacheprovider", "-q", "-rfE", "--tb=line"]
    own = folder / "pytest.ini"  # without one, pytest would find this repository's settings
    command += ["--rootdir", str(folder), "--confcutdir", str(folder)]
    command += ["-c", str(own if own.exists() else os.devnull)]
    command += ["-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"]
    named = any(".py" in argument for argument in arguments)
    command += ["--timeout", "240", *arguments, *(() if named else suite.files)]
    print(f"\n{name}", flush=True)
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, check=False
    ).returncode


def main() -> int:
    """Run the suites; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=SUITES)
    options, arguments = parser.parse_known_args()
    chat_model.main()
    if not chat_model.is_here(presets.chat_model()):
        print("There is no chat model to run the suites with", file=sys.stderr)
        return 2
    stories.make(BUILD / "models")
    names = [options.only] if options.only else list(SUITES)
    return max([run(name, arguments) for name in names])


if __name__ == "__main__":
    sys.exit(main())
