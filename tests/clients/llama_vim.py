"""llama.vim in a headless Vim, typing: `python -m tests.clients.llama_vim PATH [--url URL]`.

PATH is a copy of github.com/ggml-org/llama.vim. Without --url a model with random weights is
served: Qwen2.5-Coder 0.5B with two layers, whose suggestions mean nothing. Vim runs in a terminal
of its own and gets keys as from a person; a timer in it writes down what the plug-in shows. The
exit status is 1 if no suggestion is shown or accepted, or if one goes on after Vim has ended. The
plug-in sends one request at a time: keys pressed meanwhile wait for its answer, and cancel nothing.
"""

import argparse
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.loopback import HOST
from tests.models_e2e.repositories import REPOSITORIES
from tests.overload import serving
from tests.stack.support import ROOT
from tests.waiting import wait

MODEL = "Qwen/Qwen2.5-Coder-0.5B"
FILES = ("record.py", "shapes.py")  # of the load test; the first is read, the second edited
SLOW, FAST = 0.15, 0.025  # seconds between keys
ESCAPE, TAB, ENTER = "\x1b", "\t", "\r"
SCRIPT = """\
set nocompatible hidden noswapfile autoindent expandtab
let g:llama_config = {config}
set runtimepath^={plugin}
runtime plugin/llama.vim
let s:told = {{}}
function! s:Tell(timer)
    let l:drawn = prop_list(1, {{'end_lnum': -1, 'types': ['llama_hl_fim_hint']}})
    let l:got = map(values(g:cache_data), {{_, raw -> json_decode(raw).content}})
    let l:now = {{'shown': llama#is_fim_hint_shown() && !empty(l:drawn), 'got': l:got,
        \\ 'text': getline(1, '$'), 'file': expand('%:t')}}
    if l:now != s:told
        let s:told = l:now
        call writefile([json_encode(l:now)], '{told}', 'a')
    endif
endfunction
call timer_start(20, function('s:Tell'), {{'repeat': -1}})
"""


class Vim:
    """A Vim with the plug-in, in a terminal that nobody sees."""

    def __init__(self, folder: Path, plugin: Path, config: dict[str, Any]) -> None:
        self.told = folder / "told.jsonl"
        self.told.touch()
        script = folder / "vimrc"
        script.write_text(
            SCRIPT.format(config=json.dumps(config), plugin=plugin, told=self.told), "utf-8"
        )
        self.terminal, inner = pty.openpty()
        self.process = subprocess.Popen(
            ["vim", "-u", str(script), "-i", "NONE", FILES[0]],
            cwd=folder,
            env={**os.environ, "TERM": "xterm", "LINES": "50", "COLUMNS": "120"},
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
        )
        os.close(inner)
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        """Read what is drawn, so that Vim need not wait; the terminal ends with Vim."""
        try:
            while os.read(self.terminal, 1 << 16):
                pass
        except OSError:
            return

    def type(self, keys: str, seconds: float = 0.0) -> None:
        """Press keys, one after the other."""
        for key in keys:
            os.write(self.terminal, key.encode())
            time.sleep(seconds)

    def now(self) -> dict[str, Any]:
        """What the plug-in showed last."""
        lines = self.told.read_text("utf-8").split("\n")[:-1]  # the last one may be half written
        return json.loads(lines[-1]) if lines else dict.fromkeys(("shown", "got", "text", "file"))

    def line(self, begin: str) -> str:
        """The first line that begins so, after its blanks; empty: none."""
        lines = (line.strip() for line in self.now()["text"] or ())
        return next((line for line in lines if line.startswith(begin)), "")


@contextmanager
def running_vim(folder: Path, plugin: Path, config: dict[str, Any]) -> Iterator[Vim]:
    """Run a Vim on copies of `FILES`."""
    for name in FILES:
        shutil.copy(ROOT / "loadtest" / name, folder)
    vim = Vim(folder, plugin, config)
    try:
        yield vim
    finally:
        vim.process.kill()
        vim.process.wait()
        os.close(vim.terminal)


def drive(plugin: Path, url: str, key: str, folder: Path) -> None:
    """Type, and print what came of it.

    Raises:
        AssertionError: what should have happened.
    """

    def counted(series: str, label: str = "") -> int:
        page = httpx.get(f"{url}/metrics").raise_for_status().text
        found = re.findall(rf"^specops_{series}_total\{{(.*)\}} (\S+)$", page, re.MULTILINE)
        return int(sum(float(value) for labels, value in found if label in labels))

    def asked() -> int:
        return counted("http_requests", 'endpoint="/infill"')

    def cancelled() -> int:
        return counted("suggestions", 'outcome="cancelled"')

    config = {"endpoint_fim": f"{url}/infill", "api_key": key, "show_info": 0}
    with running_vim(folder, plugin, config) as vim:
        before = asked()
        vim.type(ENTER)  # below Vim 9.1 the plug-in warns, and works
        wait("Vim shows the first file", lambda: bool(vim.now()["text"]))
        wait("a chunk of it is read ahead", lambda: asked() > before)
        print(f"read ahead: {asked() - before} request(s)")
        vim.type(f":e {FILES[1]}{ENTER}")
        wait("Vim shows the second file", lambda: vim.now()["file"] == FILES[1])
        vim.type(f"/open_loop{ENTER}jo")
        begin = "return self.see"  # no line of the file begins so
        vim.type(begin, SLOW)
        typed = time.monotonic()
        wait("a suggestion is shown", lambda: bool(vim.now()["shown"]), 20)
        print(f"suggestion drawn {time.monotonic() - typed:.2f} s after the last key")
        vim.type(TAB)
        wait("it is accepted", lambda: len(vim.line(begin)) > len(begin), 20)
        accepted = vim.line(begin).removeprefix(begin)
        assert any(accepted in got for got in vim.now()["got"]), "it is none of the answers"
        print(f"accepted with Tab: {accepted!r}")

        vim.type(f"{ESCAPE}o")
        before, left, keys = asked(), cancelled(), "total = sum(stage.seconds for stage in FIXED)"
        vim.type(keys, FAST)
        wait("its text is there", lambda: bool(vim.line(keys)))
        time.sleep(1)  # what was asked for the last key has been answered
        print(
            f"typing fast: {len(keys)} keys, {asked() - before} requests, "
            f"{cancelled() - left} cancelled"
        )

        left, before = cancelled(), counted("client_requests")
        vim.type(f"{ENTER}x")
        wait("it is asked about", lambda: counted("client_requests") > before)
        vim.type(f"{ESCAPE}:qa!{ENTER}")
        vim.process.wait(20)
        wait("its last request is cancelled", lambda: cancelled() > left, 10)
        print(f"Vim ended while it waited: {cancelled() - left} cancelled")


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plugin", type=Path)
    parser.add_argument("--url", help="of a running service; by default one is started")
    parser.add_argument("--key", default="")
    options = parser.parse_args()
    if not (options.plugin / "autoload" / "llama.vim").is_file():
        parser.error(f"{options.plugin} is no copy of llama.vim: it has no autoload/llama.vim")
    if not (shutil.which("vim") and shutil.which("curl")):
        parser.error("vim and curl must be installed: apt-get install vim curl")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        edited = folder / "edited"
        edited.mkdir()
        try:
            if options.url:
                drive(options.plugin.resolve(), options.url.rstrip("/"), options.key, edited)
                return 0
            REPOSITORIES[MODEL].write(folder / "coder", layers=2)
            own = {"SPECOPS_MODEL": "custom", "SPECOPS_TARGET": str(folder / "coder")}
            with serving(folder, **own, SPECOPS_QUANT="int4-128-rtn") as (port, _):
                drive(options.plugin.resolve(), f"http://{HOST}:{port}", options.key, edited)
        except AssertionError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
