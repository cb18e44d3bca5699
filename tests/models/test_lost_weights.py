"""A real service whose mapped weights become shorter: it says which file, starts again and answers.

`scripts/native.py` starts it again here, and Compose's restart policy in a container.
"""

import json
import os
import sys
import threading
from pathlib import Path

import httpx
import pytest
from gguf import GGMLQuantizationType as Kind

from scripts.native import Part, supervise
from tests.checkpoints import make_llama_checkpoint
from tests.loopback import HOST, free_port
from tests.models.convert.gguf.files import SIZES, write_gguf
from tests.waiting import PATIENCE, answers, wait

pytestmark = pytest.mark.e2e
BODY = {"prompt": "the same prompt", "max_new_tokens": 8, "temperature": 0}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not name mapped files")
def test_a_service_whose_weights_become_shorter_starts_again(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", **SIZES)
    file = write_gguf(source, tmp_path / "m.gguf", lambda _: Kind.Q8_0)
    port, log = free_port(), tmp_path / "log"
    environ = {name: text for name, text in os.environ.items() if not name.startswith("SPECOPS_")}
    environ |= {"SPECOPS_MODEL": "custom", "SPECOPS_TARGET": str(file), "SPECOPS_DRAFTER": "none"}
    environ |= {"SPECOPS_CACHE_DIR": str(tmp_path / "cache"), "SPECOPS_PORT": str(port)}
    url, stopped = f"http://{HOST}:{port}", threading.Event()
    part = Part("The API", [sys.executable, "-m", "specops", "serve"], log, environ)
    supervising = threading.Thread(target=supervise, args=([part], stopped))
    supervising.start()
    try:
        wait("the service is ready", lambda: answers(f"{url}/health"), 300)
        text = httpx.post(f"{url}/generate", json=BODY, timeout=PATIENCE).json()
        (weights,) = tmp_path.glob("cache/prepacked/*/model.onnx.data")
        os.truncate(weights, 4096)
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{url}/generate", json=BODY, timeout=PATIENCE)
        wait("the service is ready again", lambda: answers(f"{url}/health"), 300)
        again = httpx.post(f"{url}/generate", json=BODY, timeout=PATIENCE).json()
        assert again["generated_text"] == text["generated_text"]
    finally:
        stopped.set()
        supervising.join()
        part.stop(60)
    lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    said = [line["message"] for line in lines if line["level"] in ("critical", "warning")]
    assert [message for message in said if str(weights.parent) in message] == [
        f"ending: {weights} has become shorter while it is in use, or its disk fails",
        f"{weights.parent} is damaged: making it again",
    ]
