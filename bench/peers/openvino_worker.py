"""OpenVINO's CPU plugin as a side of the comparison, pass by pass, as openvino-genai drives it.

It runs in the peers' environment. All settings but the number of threads are defaults: dynamic
quantization of activations, keys and values in int8, the processor's default precision.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from bench.peers.protocol import Pass, Side, prompt
from bench.tools.worker import serve


class OpenVinoSide(Side):
    """An inference request whose state holds the keys and values of all rows."""

    def load(self, model: str, *, threads: int, rows: int, capacity: int) -> str:
        """See `Side`."""
        del rows, capacity  # its state grows by itself
        compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": threads})
        self._request = compiled.create_infer_request()
        self._vocab = compiled.output("logits").get_partial_shape()[2].get_length()
        self._filled: list[npt.NDArray[Any]] = []  # keys and values of one row, by state
        self._length = 0
        return f"openvino {ov.__version__.split('-')[0]}"

    def _hold(self, rows: int, length: int) -> None:
        # The rows are copies of one computed row. A state that was set has to be reallocated to
        # grow, so the first pass after this must not be timed.
        if length and (not self._filled or self._filled[0].shape[2] < length):
            self._fill(length)
        self._request.reset_state()
        self._length = length
        if not length:
            return
        for state, filled in zip(self._request.query_state(), self._filled, strict=True):
            state.state = ov.Tensor(np.repeat(filled[:, :, :length], rows, axis=0))

    def _fill(self, length: int) -> None:
        self._request.reset_state()
        self._length = 0
        self._prefill(prompt(length, self._vocab))()
        self._filled = [np.array(state.state.data) for state in self._request.query_state()]

    def _step(self, rows: int, tokens: int) -> Pass:
        ids = np.tile(np.array(prompt(tokens, self._vocab), np.int64), (rows, 1))
        return self._prepare(ids, np.arange(tokens, dtype=np.int64))

    def _prefill(self, prompt: Sequence[int]) -> Pass:
        return self._prepare(np.array([prompt], np.int64), np.array([len(prompt) - 1], np.int64))

    def _score(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        self._hold(1, 0)
        self._prepare(np.array([tokens], np.int64), np.arange(len(tokens), dtype=np.int64))()
        return np.array(self._request.get_tensor("logits").data[0], np.float32)

    def _logits(self) -> list[float]:
        return [float(value) for value in self._request.get_tensor("logits").data[0, -1]]

    def _prepare(self, ids: npt.NDArray[np.int64], with_logits: npt.NDArray[np.int64]) -> Pass:
        rows, width = ids.shape
        start, self._length = self._length, self._length + width
        positions = np.arange(start, self._length, dtype=np.int64)
        for name, value in {
            "input_ids": ids,
            "attention_mask": np.ones((rows, self._length), np.int64),
            "position_ids": np.tile(positions, (rows, 1)),
            "beam_idx": np.arange(rows, dtype=np.int32),
            "logit_positions": with_logits,
        }.items():
            self._request.set_tensor(name, ov.Tensor(value))
        return self._request.infer


if __name__ == "__main__":
    serve(OpenVinoSide())
