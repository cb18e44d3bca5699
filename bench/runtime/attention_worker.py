"""Times a graph of attention nodes, one per layer, in a process with one checkout's interpreter.

So this file uses only parts of the project that are the same in every version.
"""

import numpy as np
from onnx import TensorProto, ValueInfoProto, helper

from bench.tools.worker import serve, timed
from specops.runtime import kernels
from specops.runtime.session import Session, load, plain_options, share_threads

WHOLE = ("spans", "block_tables", "cache")
_MAX_BYTES = 3 << 30  # of a cache: with large shapes only some layers are computed


class Passes:
    """Times passes; see `bench.tools.worker`."""

    def load(self, threads: int, *, layers: int, heads: int, kv_heads: int, size: int) -> None:
        """Set the number of threads and the model's shape."""
        share_threads(threads)
        self._heads, self._layer, self._layers = heads, (kv_heads, size), layers
        self._pool = np.full(_MAX_BYTES, 0x3C, np.uint8)
        self._sessions: dict[tuple[str, int], Session] = {}

    def passes(
        self,
        *,
        kernel: str,
        dtype: str,
        past: int,
        requests: int,
        tokens: int,
        shared: bool,
        count: int,
    ) -> list[float]:
        """Seconds of all layers in each pass.

        Args:
            kernel: name of the kernels.
            dtype: element type of the cache.
            past: cached tokens of each request.
            requests: number of requests.
            tokens: tokens of each request in a pass.
            shared: whether the requests share all whole blocks of the past.
            count: number of timed passes.
        """
        blocks = -(-(past + tokens) // kernels.BLOCK_TOKENS)
        one = kernels.block_bytes([self._layer], dtype)
        layers = min(self._layers, _MAX_BYTES // (requests * blocks * one))
        kv_heads, size = self._layer
        width = (self._heads + 2 * kv_heads) * size
        tables = np.arange(requests * blocks).reshape(requests, blocks)
        if shared:
            tables[:, : past // kernels.BLOCK_TOKENS] = tables[0, : past // kernels.BLOCK_TOKENS]
        numbers = (self._pool.ctypes.data, tables.size, layers * one, kernels.KV_DTYPES[dtype])
        query = np.random.default_rng(0).normal(size=(1, requests * tokens, width))
        feeds = {
            "query": query.astype(np.float32),
            "spans": np.array([(slot, past, tokens) for slot in range(requests)], np.int64),
            "block_tables": tables.astype(np.int64),
            "cache": np.array(numbers, np.int64),
        }
        run = self._opened(kernel, layers).run
        return [item * self._layers / layers for item in timed(lambda: run(None, feeds), count)]

    def bandwidth(self) -> float:
        """Bytes per second that all cores together read from memory."""
        numbers = self._pool.view(np.float32)
        return self._pool.nbytes / min(timed(lambda: np.dot(numbers, numbers), 3))

    def _opened(self, kernel: str, layers: int) -> Session:
        if (kernel, layers) not in self._sessions:
            kernels.force(kernel)
            self._sessions[kernel, layers] = self._nodes(layers)
        return self._sessions[kernel, layers]

    def _nodes(self, layers: int) -> Session:
        kv_heads, size = self._layer
        fixed = {"num_heads": self._heads, "scale": size**-0.5, "softcap": 0.0, "window": 0}
        fixed |= {"kv_num_heads": [kv_heads] * layers, "head_size": [size] * layers}
        fixed |= {"rotary_interleaved": 0, "rotary_factor": 1.0, "rotary_within": 0}
        inputs = ["query", "", "", *WHOLE]
        nodes = [
            helper.make_node(
                kernels.ATTENTION, inputs, [f"out{layer}"], domain=kernels.DOMAIN,
                layer=layer, epsilon=1e-6, **fixed,
            )
            for layer in range(layers)
        ]  # fmt: skip

        def described(name: str) -> ValueInfoProto:
            kind = TensorProto.INT64 if name in WHOLE else TensorProto.FLOAT
            return helper.make_tensor_value_info(name, kind, None)

        outputs = [described(f"out{layer}") for layer in range(layers)]
        graph = helper.make_graph(
            nodes, "attention", [described(name) for name in inputs if name], outputs
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(kernels.DOMAIN, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        return load(model.SerializeToString(), plain_options())


if __name__ == "__main__":
    serve(Passes())
