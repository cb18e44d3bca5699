"""OpenVINO GenAI's continuous batching as a side, as its users serve several requests.

It runs in the peers' environment. All settings but the number of threads are defaults: blocks of
keys and values in int8, prompts split and fused with decoding, 256 tokens per pass.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai

from bench.peers.protocol import Side
from bench.tools.worker import serve

_CACHE_GIGABYTES = 1  # far more than the requests need


class GenAiSide(Side):
    """A pipeline that takes token ids."""

    def load(self, model: str, *, threads: int, rows: int, capacity: int) -> str:
        """See `Side`."""
        del rows, capacity  # it takes any number of requests
        options = genai.SchedulerConfig()
        options.cache_size = _CACHE_GIGABYTES
        with tempfile.TemporaryDirectory() as folder:
            _write(Path(model), Path(folder))
            self._pipeline = genai.ContinuousBatchingPipeline(
                folder, options, "CPU", {"INFERENCE_NUM_THREADS": threads}
            )
        return f"openvino-genai {genai.__version__.split('-')[0]}"

    def _complete(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        options = genai.GenerationConfig()
        options.max_new_tokens = output
        options.ignore_eos = True
        options.do_sample = False
        answers = self._pipeline.generate(
            [ov.Tensor(np.array([prompt], np.int64)) for prompt in prompts],
            [options] * len(prompts),
        )
        return [[int(token) for token in answer.m_generation_ids[0]] for answer in answers]


def _write(model: Path, folder: Path) -> None:
    """Write the folder that the pipeline loads.

    The pipeline chooses the positions of logits itself, so the graph loses its input for them.
    """
    graph = ov.Core().read_model(model)
    (positions,) = (
        item for item in graph.get_parameters() if item.get_friendly_name() == "logit_positions"
    )
    (use,) = positions.output(0).get_target_inputs()
    gather = use.get_node()
    for follower in gather.output(0).get_target_inputs():
        follower.replace_source_output(gather.input_value(0))
    graph.remove_parameter(positions)
    ov.save_model(graph, folder / "openvino_model.xml", compress_to_fp16=False)
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    for name, content in (
        ("config.json", {"model_type": "llama", **tokens}),
        ("generation_config.json", tokens),
    ):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    serve(GenAiSide())
