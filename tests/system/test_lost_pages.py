"""A mapped file that becomes shorter ends the process with one line that names the file."""

import json
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

PROGRAM = """
import mmap, os, sys, threading
from specops.runtime import kernels
kernels.report_lost_pages()
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    file.truncate(4096)
reads = lambda: mapped[mmap.PAGESIZE * 2]
several = [threading.Thread(target=reads) for _ in range(int(sys.argv[2]))]
[one.start() for one in several]
[one.join() for one in several]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not name mapped files")
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("name", ["model.onnx.data", 'with "quotes" and \\ and ü'])
def test_the_line_names_the_file(name: str, threads: int, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(bytes(1 << 16))
    command = [sys.executable, "-c", PROGRAM, str(file), str(threads)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == -signal.SIGBUS
    (line,) = found.stderr.splitlines()
    said = json.loads(line)
    message = said.pop("message")
    assert message == f"ending: {file} has become shorter while it is in use, or its disk fails"
    when = datetime.fromisoformat(said.pop("time"))
    assert abs(datetime.now(UTC) - when) < timedelta(minutes=5)
    assert said == {"level": "critical", "logger": "specops"}
