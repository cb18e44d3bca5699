"""All models of a process compute on one set of threads."""

import json
import subprocess
import sys
from pathlib import Path

from specops.config import Settings

# In a process of its own: a process has one pool, and this one's is made already.
COUNT = """
import json, os, sys, threading
from pathlib import Path
from specops.config import Settings
from specops.engine.engine import Engine
from specops.request import GenerationRequest
from specops.runtime import calibration

calibration._ENOUGH_SECONDS = 0.0  # as in all tests

def threads():
    return len(os.listdir("/proc/self/task")) - threading.active_count()  # without Python's

cache, *models = sys.argv[1:]
request = GenerationRequest(
    request_id="", prompt_tokens=(1,) * 16, max_new_tokens=4, drafter="draft", k_draft=2
)
found, engines = [threads()], []
for target, draft in zip(models[::2], models[1::2]):
    settings = Settings(target=target, draft=draft, cache_dir=Path(cache), threads=3)
    engines.append(Engine.load(settings))
    for engine in engines:
        assert list(engine.generate(request))[-1].error is None
    found.append(threads())
print(json.dumps(found))
"""


def test_another_model_brings_no_other_threads(tiny_pair: Path, tiny_settings: Settings) -> None:
    models = [
        str(tiny_pair / model / "onnx" / quant)
        for quant in ("int8-128", "int4-32-rtn")
        for model in ("target", "draft")
    ]
    command = [sys.executable, "-c", COUNT, str(tiny_settings.cache_dir), *models]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, *after = json.loads(done.stdout)
    assert len(set(after)) == 1
    assert after[0] - before <= 2  # who calls computes, too
