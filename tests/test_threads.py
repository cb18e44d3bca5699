"""Target, draft and the graph that reads prompts compute on one set of threads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# In a process of its own: a process has one pool, and this one's is made already.
COUNT = """
import json, os, sys
from pathlib import Path
from specops.decoder import Decoder
from specops.session import open_session, share_threads

def threads():
    return len(os.listdir("/proc/self/task"))

share_threads(3)
found, decoders = [threads()], []
for graph in sys.argv[1:]:
    decoders.append(Decoder(open_session(Path(graph)), rows=2, capacity=64, max_width=32))
    for decoder in decoders:
        decoder.extend(0, [1] * 16)
        decoder.cache.truncate(0, 0)
    found.append(threads())
print(json.dumps(found))
"""


def test_another_model_brings_no_other_threads(tiny_pair: Path) -> None:
    graphs = [
        str(tiny_pair / model / "onnx" / quant / "model.onnx")
        for model in ("target", "draft")
        for quant in ("int8-128", "int4-32")
    ]
    command = [sys.executable, "-c", COUNT, *graphs]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, *after = json.loads(done.stdout)
    assert len(set(after)) == 1
    assert after[0] - before <= 2  # who calls computes, too
