"""What layers with a state compute for a whole sequence, token by token in float64.

The functions take what the operators take, without leading dimensions; see `states_operator.c`.
"""

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]


def short_conv(x: Floats, weight: Floats, bias: Floats | None = None) -> Doubles:
    """x [T, 3 * channels] with gates, or [T, channels] without; weight [kernel_size, channels]."""
    kernel_size, channels = weight.shape
    gates = x.shape[1] == 3 * channels
    b, c, x = np.split(np.float64(x), 3, axis=1) if gates else (1.0, 1.0, np.float64(x))
    padded = np.concatenate([np.zeros((kernel_size - 1, channels)), b * x])
    out = sum(padded[tap : tap + len(x)] * weight[tap] for tap in range(kernel_size))
    out = out if bias is None else out + bias
    return c * out if gates else _silu(out)


def gated_delta(
    *,
    mixed: Floats,
    gate: Floats,
    a: Floats,
    b: Floats,
    decay: Floats,
    bias: Floats,
    norm: Floats,
    key_heads: int,
    epsilon: float,
    tiled: bool = False,
) -> tuple[Doubles, Doubles]:
    """The outputs [T, heads * value_size], and the last state [heads, key_size, value_size]."""
    heads, size, count = len(decay), len(norm), len(mixed)
    keys = (mixed.shape[1] - heads * size) // 2
    queries, key, value = np.split(np.float64(mixed), [keys, 2 * keys], axis=1)
    value = value.reshape(count, heads, size)
    queries, key = (_shared(part, key_heads, heads, tiled=tiled) for part in (queries, key))
    queries, key = (
        part / np.sqrt((part**2).sum(2, keepdims=True) + 1e-6) for part in (queries, key)
    )
    queries = queries / np.sqrt(queries.shape[2])
    decays, rates = np.exp(decay * _softplus(np.float64(a) + bias)), _sigmoid(np.float64(b))
    state = np.zeros((heads, keys // key_heads, size))
    out = np.empty((count, heads, size))
    for t in range(count):
        state *= decays[t, :, None, None]
        delta = (value[t] - np.einsum("hkv,hk->hv", state, key[t])) * rates[t, :, None]
        state += key[t, :, :, None] * delta[:, None]
        out[t] = np.einsum("hkv,hk->hv", state, queries[t])
    out = out / np.sqrt((out**2).mean(2, keepdims=True) + epsilon) * norm
    return out.reshape(count, -1) * _silu(np.float64(gate)), state


def state_space(
    *,
    mixed: Floats,
    gate: Floats,
    dt: Floats,
    decay: Floats,
    bias: Floats,
    skip: Floats,
    state_size: int,
) -> tuple[Doubles, Doubles]:
    """The outputs [T, heads * size], and the last state [heads, state_size, size]."""
    heads, (count, inner) = len(decay), gate.shape
    keys = (mixed.shape[1] - inner) // 2
    x, b, c = np.split(np.float64(mixed), [inner, inner + keys], axis=1)
    x = x.reshape(count, heads, -1)
    b, c = (_shared(part, keys // state_size, heads) for part in (b, c))
    rates = _softplus(np.float64(dt) + bias)
    decays = np.exp(rates * decay)
    state = np.zeros((heads, state_size, inner // heads))
    out = np.empty_like(x)
    for t in range(count):
        inputs = x[t] * rates[t, :, None]
        state = state * decays[t, :, None, None] + b[t, :, :, None] * inputs[:, None]
        out[t] = np.einsum("hkv,hk->hv", state, c[t]) + x[t] * np.float64(skip)[:, None]
    return out.reshape(count, -1) * _silu(np.float64(gate)), state


def _shared(part: Doubles, groups: int, heads: int, *, tiled: bool = False) -> Doubles:
    """Each group's vectors once for each of its heads: [T, heads, size]."""
    of = np.arange(heads)
    return part.reshape(len(part), groups, -1)[:, of % groups if tiled else of // (heads // groups)]


def _sigmoid(x: Doubles) -> Doubles:
    return np.exp(-np.logaddexp(0.0, -x))


def _silu(x: Doubles) -> Doubles:
    return x * _sigmoid(x)


def _softplus(x: Doubles) -> Doubles:
    return np.logaddexp(0.0, x)
