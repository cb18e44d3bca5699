"""Products and attention are cut into pieces for threads; results do not depend on the cut.

The cut alone shows that many cores would share a pass evenly. More threads than this machine has
cores show that the bits stay the same.
"""

import hashlib
import heapq
import itertools
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest

from specops.runtime import kernels
from specops.runtime.kernels.packing import WeightType
from tests.runtime.kernels import states
from tests.runtime.kernels.attention import Cache, Layer
from tests.runtime.kernels.states import TRUE_SHAPES, random_tokens
from tests.runtime.kernels.test_attention import DTYPES, FEW, LONG_SHAPES, SHAPES, made
from tests.runtime.kernels.test_matmul import multiply, random_weights

ROOT = Path(__file__).resolve().parents[3]
TILE, SPLIT = 16, 256  # columns, positions
PRODUCTS = {  # columns, depth: query, key and value; attention's output; gate and up; down; head
    "TinyLlama": ((2560, 2048), (2048, 2048), (11264, 2048), (2048, 5632), (32000, 2048)),
    "SmolLM2-135M": ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)),
    "Qwen3-0.6B": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)),
}
MANY = (*range(1, 17), 21, 24, 32, 39, 48, 64)
ATTENTION = {  # heads, heads of the cache, size
    "SmolLM2's": (9, 3, 64),
    "TinyLlama's": (32, 4, 64),
    "Qwen3's": (16, 8, 128),
    "Qwen2.5's": (14, 2, 64),
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    kernels.share(2)


def makespan(pieces: Iterable[int], threads: int) -> int:
    """Work of the busiest thread; a thread that is done takes the next piece."""
    loads = [0] * threads
    for size in pieces:
        heapq.heapreplace(loads, loads[0] + size)
    return max(loads)


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("model", PRODUCTS)
def test_the_busiest_thread_has_a_tenth_more_than_the_mean(model: str, rows: int) -> None:
    """At most, unless threads would have to share a tile."""
    for (columns, depth), threads in itertools.product(PRODUCTS[model], MANY):
        kernels.share(threads)
        pieces = kernels.library.specops_pieces(columns, depth, 64, WeightType.INT4, rows)
        tiles = columns // TILE
        worth = columns * depth * max(rows, 4) // 400_000  # more threads would have too little
        busy = max(1, min(threads, worth, tiles))
        edges = [piece * tiles // pieces for piece in range(pieces + 1)]
        most = makespan((stop - start for start, stop in itertools.pairwise(edges)), threads)
        assert most <= max(1.1 * tiles / busy, -(-tiles // busy)), (columns, depth, threads)


@pytest.mark.parametrize("threads", [2, 3, 4, 8])
@pytest.mark.parametrize("past", [1000, 2000, 8000])
@pytest.mark.parametrize("shape", ATTENTION)
def test_threads_share_attention_evenly(shape: str, past: int, threads: int) -> None:
    """That of one token; a thread that is done takes the next of all heads' pieces."""
    heads, kv_heads, size = ATTENTION[shape]
    kernels.share(threads)
    sizes = (
        kernels.library.specops_piece_positions(heads, kv_heads, size, past, piece)
        for piece in itertools.count()
    )
    pieces = [size for size in itertools.takewhile(bool, sizes) for _ in range(kv_heads)]
    assert sum(pieces) == kv_heads * (past + 1)
    mean = sum(pieces) / threads
    assert makespan(pieces, threads) <= max(1.1 * mean, mean + SPLIT)
    if shape == "SmolLM2's" and threads == 2 and past >= 2000:
        assert makespan(pieces, threads) <= 1.1 * mean


def test_attention_is_cut_only_while_its_parts_fit_into_little_memory() -> None:
    """At 16 MiB of results it is not: one token behind millions in each of three heads."""
    kernels.share(2)
    positions = partial(kernels.library.specops_piece_positions, 9, 3, 64)
    assert positions(1_000_000, 0) < 1_000_000
    assert positions(10_000_000, 0) == 10_000_001


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", LONG_SHAPES, ids=lambda layer: f"window {layer.window}")
@pytest.mark.parametrize("threads", [1, 3, 16])
def test_splits_that_threads_share_change_nothing(threads: int, layer: Layer, dtype: str) -> None:
    """Spans that end before, at and behind the positions where the past is split."""
    attention, tokens = made(layer)
    cache = Cache(layer, dtype)
    whole = attention.whole(cache, 0, tokens)
    kernels.share(threads)
    for start, length in [(255, 1), (256, 1), (511, 1), (512, 1), (599, 1), (250, 9), (508, 24)]:
        found = attention.step(cache, (0, start, tokens.part(start, start + length)))
        assert np.array_equal(found, whole[start : start + length])


def test_little_work_is_not_cut() -> None:
    kernels.share(64)
    assert kernels.library.specops_pieces(256, 256, 64, WeightType.INT4, 1) == 1


@cache
def digest() -> str:
    """Of products, of attention in one span and token by token, and of recurrences."""
    weights = random_weights(1000, 1024, WeightType.INT4_ZERO, 64, bias=True)
    x = np.random.default_rng(5).normal(size=(1, 37, 1024)).astype(np.float32)
    found = hashlib.sha256(multiply(weights, x).tobytes())
    for name, dtype in itertools.product(FEW, DTYPES):
        attention, tokens = made(SHAPES[name])
        cache = Cache(SHAPES[name], dtype)
        found.update(attention.whole(cache, 0, tokens).tobytes())
        for place in range(0, len(tokens.query), 29):
            out = attention.step(cache, (0, place, tokens.part(place, place + 1)))
            found.update(out.tobytes())
    for shape in TRUE_SHAPES.values():
        sequences = [random_tokens(shape, 40, slot) for slot in range(2)]
        layer = states.Layer(shape)
        found.update(layer.step(sequences, (0, 0, 24, 0, 20), (1, 0, 40, 0, 40)).tobytes())
        found.update(layer.step(sequences, (0, 24, 16, 20, 28)).tobytes())
        found.update(layer.state(0).tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("threads", [2, 16])
def test_any_number_of_threads_computes_the_same_bits(threads: int) -> None:
    """In a process of its own: a process has one pool of threads."""
    code = "from tests.runtime.kernels.test_threads import digest; print(digest())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "KERNEL_TEST_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == digest()
