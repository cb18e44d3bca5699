"""Attention agrees with float64, and a token gets the same bits in any pass."""

import numpy as np
import pytest

from specops.runtime import kernels
from tests.runtime.kernels.attention import Attention, Cache, Layer, Tokens, expected

LENGTH, LONG = 150, 600  # over three blocks and three splits, the last one partly
DTYPES = list(kernels.KV_DTYPES)
ERRORS = {"fp32": 1e-6, "fp16": 5e-4, "int8": 1.5e-2}  # root mean square, of the output's
SHAPES = {
    "one head": Layer(heads=1, kv_heads=1, size=8),
    "a head each": Layer(heads=3, kv_heads=3, size=16, rotated=16),
    "groups": Layer(heads=8, kv_heads=2, size=64, rotated=64),
    "more heads than a tile": Layer(heads=71, kv_heads=1, size=16, rotated=16),
    "size 40": Layer(size=40, rotated=40),
    "size 80, partly rotated": Layer(size=80, rotated=32),
    "size 96": Layer(size=96, rotated=96),
    "by frequencies": Layer(heads=6, size=40, rotated=40, frequencies=True),
    "size 128": Layer(size=128, rotated=128, norm=True),
    "size 256": Layer(size=256, rotated=256, softcap=5.0),
    "size 512": Layer(heads=8, size=512, rotated=512, norm=True, value_norm=True),
    "neighbours": Layer(size=32, rotated=32, interleaved=True),
    "neighbours, partly": Layer(size=64, rotated=24, interleaved=True),
    "packed": Layer(heads=6, kv_heads=3, size=48, rotated=48, packed=True),
    "window of one": Layer(window=1),
    "window within a block": Layer(window=10, rotated=16),
    "window over blocks": Layer(window=70, rotated=16),
    "window over splits": Layer(heads=8, kv_heads=2, size=64, window=300),
    "soft cap": Layer(softcap=0.7),
    "norms": Layer(norm=True),
    "everything": Layer(
        *(6, 3, 40, 16), interleaved=True, window=33, softcap=2.0, norm=True, packed=True
    ),
}
LONG_SHAPES = SHAPES["groups"], SHAPES["window over splits"]
FEW = [
    "groups",
    "everything",
    "by frequencies",
    "size 96",
    "window over blocks",
    "window over splits",
]


def made(layer: Layer) -> tuple[Attention, Tokens]:
    return Attention(layer), Tokens.random(layer, LONG if layer in LONG_SHAPES else LENGTH)


@pytest.fixture(params=FEW)
def layer(request: pytest.FixtureRequest) -> Layer:
    return SHAPES[request.param]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_it_agrees_with_float64_on_every_processor(name: str, dtype: str) -> None:
    """All kernels give the same bits, in the cache, too."""
    layer, found = SHAPES[name], []
    for kernel in kernels.NAMES:
        kernels.force(kernel)
        attention, tokens = made(layer)
        cache = Cache(layer, dtype, fill=0)
        found.append((attention.whole(cache, 1, tokens), cache.pool))
    exact = expected(layer, attention.weights, tokens)
    error = np.sqrt(np.mean((found[0][0] - exact) ** 2) / np.mean(exact**2))
    assert error < ERRORS[dtype]
    for out, pool in found[1:]:
        assert np.array_equal(out, found[0][0])
        assert np.array_equal(pool, found[0][1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_and_other_requests_change_nothing(layer: Layer, dtype: str) -> None:
    """Prompts are cut at any tokens; other slots' spans are in the pass, in any order."""
    attention, whole = made(layer)
    lengths = {0: len(whole.query), 1: 70, 2: 3}
    tokens = {slot: Tokens.random(layer, length, seed=slot) for slot, length in lengths.items()}
    alone = {slot: attention.whole(Cache(layer, dtype), slot, tokens[slot]) for slot in lengths}
    cache, done = Cache(layer, dtype), dict.fromkeys(lengths, 0)
    random = np.random.default_rng(4)
    while done != lengths:
        spans = []
        for slot in random.permutation(list(lengths)).tolist():
            stop = min(done[slot] + int(random.choice([0, 1, 1, 4, 9, 70])), lengths[slot])
            spans.append((slot, done[slot], tokens[slot].part(done[slot], stop)))
            done[slot] = stop
        found = attention.step(cache, *spans)
        parts = [alone[slot][start : done[slot]] for slot, start, _ in spans]
        assert np.array_equal(found, np.concatenate(parts))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rollbacks_and_shared_blocks_change_nothing(layer: Layer, dtype: str) -> None:
    attention, tokens = made(layer)
    length = len(tokens.query)
    whole = attention.whole(Cache(layer, dtype), 0, tokens)
    cache, wrong = Cache(layer, dtype), Tokens.random(layer, length, seed=9)
    attention.step(cache, (0, 0, tokens.part(0, 60)))
    attention.step(cache, (0, 60, wrong.part(60, length - 20)))
    again = attention.step(cache, (0, 60, tokens.part(60, length)))
    assert np.array_equal(again, whole[60:])
    shared = (length - 22) // 64
    cache.tables[1, :shared] = cache.tables[0, :shared]
    start = 64 * shared
    last = (0, length - 1, tokens.part(length - 1, length))
    found = attention.step(cache, (1, start, tokens.part(start, length)), last)
    assert np.array_equal(found, np.concatenate([whole[start:], whole[-1:]]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["groups", "window over splits", "size 256"])
def test_requests_that_share_blocks_get_the_bits_of_their_own(name: str, dtype: str) -> None:
    """They share one split, two, or more with another one than the first, or none."""
    layer, length = SHAPES[name], 768
    attention = Attention(layer)
    texts, sharing = [Tokens.random(layer, length)], ((0, 9), (0, 4), (1, 11), (0, 0), (3, 8))
    cache = Cache(layer, dtype, slots=1 + len(sharing))
    attention.step(cache, (0, 0, texts[0].part(0, 760)))
    for slot, (other, blocks) in enumerate(sharing, start=1):
        start = 64 * blocks
        own = Tokens.random(layer, length, seed=slot)
        parts = zip(texts[other].part(0, start), own.part(start, length), strict=True)
        texts.append(Tokens(*map(np.concatenate, parts)))
        cache.tables[slot, :blocks] = cache.tables[other, :blocks]
        attention.step(cache, (slot, start, texts[slot].part(start, 760)))
    spans = [(slot, 760, text.part(760, 761 + slot)) for slot, text in enumerate(texts)]
    found = attention.step(cache, *spans)
    alone = [attention.whole(Cache(layer, dtype), 0, text)[760:] for text in texts]
    parts = [out[: 1 + slot] for slot, out in enumerate(alone)]
    assert np.array_equal(found, np.concatenate(parts))


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_before_the_window_may_be_missing(dtype: str) -> None:
    layer = SHAPES["window over blocks"]
    attention, tokens = made(layer)
    cache = Cache(layer, dtype)
    whole = attention.whole(cache, 0, tokens)
    cache.tables[0, 0] = -1
    found = attention.step(cache, (0, 149, tokens.part(149, 150)))
    assert np.array_equal(found, whole[149:])
    with pytest.raises(Exception, match="not in the cache"):
        attention.step(cache, (0, 132, tokens.part(132, 133)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_layers_keep_their_memory(dtype: str) -> None:
    """Layers with other heads of other sizes lie before and behind it in each block."""
    layer = SHAPES["groups"]
    attention, tokens = made(layer)
    cache = Cache(layer, dtype, fill=0xAB)
    attention.whole(cache, 1, tokens)
    before, own, _ = (kernels.block_bytes([one], dtype) for one in layer.layers)
    blocks = cache.pool.reshape(-1, cache.bytes)
    parts = np.split(blocks, [before, before + own], axis=1)
    assert (parts[0] == 0xAB).all()
    assert (parts[2] == 0xAB).all()
    assert {int(i) for i in np.flatnonzero((parts[1] != 0xAB).any(-1))} == {
        *cache.tables[1, : -(-LONG // kernels.BLOCK_TOKENS)].tolist()
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["groups", "size 512", "window over blocks"])
def test_a_layer_may_read_what_another_one_wrote(name: str, dtype: str) -> None:
    """It gives the bits of a layer that writes the same keys and values itself."""
    layer = SHAPES[name]
    attention, tokens = made(layer)
    cache = Cache(layer, dtype)
    written = attention.whole(cache, 0, tokens)
    reading, pool = Attention(layer, without="key value"), cache.pool.copy()
    feeds = attention.feeds(cache, (0, 0, tokens))
    again = reading.run(
        {name: feed for name, feed in feeds.items() if name not in ("key", "value")}
    )
    assert np.array_equal(again, written)
    assert np.array_equal(cache.pool, pool)


@pytest.mark.parametrize("kind", ["any bits", "small", "halfway"])
def test_float16_is_rounded_as_ieee_says(each_kernel: str, kind: str) -> None:
    """The output for a single token is its value, as the cache holds it."""
    layer = Layer(heads=64, kv_heads=64, size=256)
    random = np.random.default_rng(6)
    bits = random.integers(0, 1 << 32, (64, 256), np.uint32)
    value = bits.view(np.float32)
    if kind == "small":
        value = random.normal(0, 1e-6, (64, 256)).astype(np.float32)
    if kind == "halfway":
        value = ((bits & 0x8FFFF000) + 0x38000000).view(np.float32)
    tokens = Tokens.random(layer, 1)._replace(value=value[None])
    attention = Attention(layer)
    with np.errstate(over="ignore", invalid="ignore"):
        half = value.astype(np.float16).astype(np.float32)
    found = attention.whole(Cache(layer, "fp16"), 0, tokens)[0]
    assert np.array_equal(found, half, equal_nan=True)


@pytest.mark.parametrize("largest", [3.7, 1e-20, 1e-35, 0.0])
def test_int8_has_a_scale_for_each_token_and_head(largest: float) -> None:
    layer = Layer(heads=4, kv_heads=4, size=40)
    tokens = Tokens.random(layer, 1)
    value = tokens.value / np.abs(tokens.value).max(-1, keepdims=True) * np.float32(largest)
    attention = Attention(layer)
    found = attention.whole(Cache(layer, "int8"), 0, tokens._replace(value=value))
    scales = np.abs(value).max(-1, keepdims=True).astype(np.float64) / 127
    if largest < 1e-30:
        assert not found.any()
    else:
        assert np.abs(found - value).max() <= 0.501 * scales.max()
        assert np.allclose(found / scales, np.rint(found / scales), atol=1e-4)


@pytest.mark.parametrize("size", [64, 80, 96])
def test_int8_bears_channels_with_far_larger_keys(size: int) -> None:
    """Their products are those of all others: a transform shares them out before rounding."""
    layer = Layer(heads=4, kv_heads=2, size=size)
    attention, tokens = made(layer)
    larger = np.where(np.arange(size) % 29 == 3, 20, 1).astype(np.float32)
    tokens = tokens._replace(query=tokens.query / larger, key=tokens.key * larger)
    exact = expected(layer, attention.weights, tokens)
    found = attention.whole(Cache(layer, "int8"), 0, tokens)
    assert np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2)) < 0.04


@pytest.mark.parametrize("odd", [np.nan, np.inf])
@pytest.mark.parametrize("part", ["query", "key", "value"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_numbers_reach_later_tokens_and_no_earlier_ones(
    dtype: str, part: str, odd: float
) -> None:
    layer = Layer(heads=2, kv_heads=1, size=16)
    attention, tokens = made(layer)
    whole = attention.whole(Cache(layer, dtype), 0, tokens)
    tensor = getattr(tokens, part).copy()
    tensor[40, 0, 3] = odd * np.sign(tokens.query[40, 0, 3])  # a score is inf then, never -inf
    found = attention.whole(Cache(layer, dtype), 0, tokens._replace(**{part: tensor}))
    assert np.array_equal(found[:40], whole[:40])
    assert not np.isfinite(found[40, 0]).all()
    if part == "query":
        assert np.array_equal(found[41:], whole[41:])
        assert np.array_equal(found[40, 1], whole[40, 1])


def test_a_pass_without_tokens() -> None:
    layer = Layer()
    attention, tokens = made(layer)
    found = attention.step(Cache(layer, "fp32"), (-3, -1, tokens.part(0, 0)))
    assert found.shape == (0, layer.heads, layer.size)
