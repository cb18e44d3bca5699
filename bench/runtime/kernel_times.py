"""Checks and times every matrix product kernel that this processor can run, in one table.

All kernels must compute the same bits; the exit status is 1 if they do not. A machine needs only
this project's wheel and this file:

    pip install dist/specops-*.whl && python bench/runtime/kernel_times.py --threads 1

Each time is the minimum over some rounds, in turns, of eight consecutive products, whose weights do
not fit into a core's private cache.
"""

import argparse
import sys
import time

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper

from specops.runtime import kernels
from specops.runtime.kernels.packing import WeightType, pack, pack_rows, row_bytes
from specops.runtime.session import Session, load, plain_options, share_threads
from specops.system.cpus import available_threads

COLUMNS, DEPTH, PRODUCTS = 2048, 2048, 8
FINITE = np.uint8(0xBF)  # clears exponents' highest bit: all float16 scales stay finite


def tiles(random: np.random.Generator, name: str) -> tuple[WeightType, npt.NDArray[np.uint8], int]:
    """Random weights: their type, tiles and block size."""
    if name.startswith("INT"):
        bits, block = int(name[3]), 128 if name[3] == "4" else 32
        shape = (COLUMNS, DEPTH // block, block * bits // 8)
        scales = random.choice(np.array([0.25, 0.5, -0.125], np.float32), shape[:2])
        codes = random.integers(0, 256, shape, np.uint8)
        return *pack(codes, scales, None, bits=bits, block=block), block
    type = WeightType[name]
    raw = random.integers(0, 256, (COLUMNS, row_bytes(type, DEPTH)), np.uint8) & FINITE
    if type is WeightType.MXFP4:
        raw[:, ::17] = 120  # the exponents: denormal products take many times as long
    return type, pack_rows(raw, type, DEPTH), 32


def opened(weights: tuple[WeightType, npt.NDArray[np.uint8], int], products: int) -> Session:
    """A session of products, each with its copy of the weights, that uses the current kernels."""
    type, packed, block = weights
    names = [f"y{index}" for index in range(products)]
    fixed = {"K": DEPTH, "N": [COLUMNS], "types": [int(type)], "block_size": block}
    fixed |= {"bias": 0, "input": 0, "epsilon": 0.0}
    nodes = [
        helper.make_node(kernels.MATMUL, ["x", f"w{name}"], [name], domain=kernels.DOMAIN, **fixed)
        for name in names
    ]
    tensors = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in some]
        for some in (["x"], names)
    ]
    stored = [numpy_helper.from_array(packed, f"w{name}") for name in names]
    graph = helper.make_graph(nodes, "products", *tensors, stored)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(kernels.DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return load(model.SerializeToString(), plain_options())


def main() -> int:
    """Print the table; return 1 if kernels disagree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=available_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 128, 512])
    options = parser.parse_args()
    share_threads(options.threads)
    random, wrong = np.random.default_rng(1), ""
    print(f"{kernels.kernel()}, {options.threads} threads: milliseconds of {PRODUCTS} products\n")
    print(f"| weights | rows | {' | '.join(kernels.NAMES)} |")
    print(f"|---|---:|{'---:|' * len(kernels.NAMES)}")
    for kind in ("INT4", "INT8", "Q4_K", "Q6_K"):
        weights, sessions = tiles(random, kind), {}
        for name in kernels.NAMES:  # a session keeps the kernels with which it was opened
            kernels.force(name)
            sessions[name] = opened(weights, PRODUCTS)
        for rows in options.rows:
            x = random.normal(size=(rows, DEPTH)).astype(np.float32)
            found = {name: one.run(None, {"x": x})[0].tobytes() for name, one in sessions.items()}
            taken = dict.fromkeys(kernels.NAMES, float("inf"))
            for _ in range(options.rounds):
                for name, one in sessions.items():  # in turns
                    start = time.perf_counter()
                    one.run(None, {"x": x})
                    taken[name] = min(taken[name], 1e3 * (time.perf_counter() - start))
            cells = [kind, str(rows), *(f"{ms:.2f}" for ms in taken.values())]
            print(f"| {' | '.join(cells)} |", flush=True)
            if len({*found.values()}) > 1:
                wrong = f"{kind}, {rows} rows: the kernels' bits differ"
                print(wrong, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
