"""Rotations: for each pair of a head's values its angle from a position to the next."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specops.models.convert.model_config import ModelConfig

Float = NDArray[np.float32]

HEAD_DIM_MULTIPLE, MAX_HEAD_DIM = 8, 512  # the limits of `specops.Attention`
_BLOCK = 64  # positions of a KV block
_MAX_POSITIONS = 1 << 20  # their angles are exact enough in float32
# With "mrope" an image has positions on three axes; a token of a text has the same on all of them.
_PLAIN = ("default", "mrope")
_LONG_ROPE = ("longrope", "su")  # two names of one scaling
_PROPORTIONAL = "proportional"
_KINDS_OF_LAYERS = ("full_attention", "sliding_attention")  # keys where each has a rotation


class Table(NamedTuple):
    """A position's angles are position * `frequencies` [rotated / 2], in float32.

    Their cosines and sines are multiplied by `factor`; there are `positions`.
    """

    frequencies: Float
    positions: int
    factor: float


class Rotary(NamedTuple):
    """A rotation, and the one that replaces it in contexts with more positions."""

    table: Table
    long: Table | None = None


class Rotation(NamedTuple):
    """The parameters of a table; the first `rotated` values of a head are rotated."""

    rotated: int
    positions: int
    theta: float


def rotary(
    config: ModelConfig,
    head_dim: int,
    positions: int,
    *,
    partial: bool = False,
    scaling: ModelConfig | None = None,
) -> Rotary:
    """The rotations for a config.json.

    Reads `scaling` or, without it, transformers 5's `rope_parameters` or the older `rope_theta` and
    `rope_scaling`. A `partial` family may rotate `partial_rotary_factor` of each head. Raises
    ExportError for a scaling other than default, linear, llama3, yarn, longrope and proportional,
    for head sizes that the operator cannot rotate, for too many positions, and for angles that are
    not finite.

    Args:
        config: of the language model.
        head_dim: numbers in a head.
        positions: rows of the tables.
        partial: the family may rotate a part of each head.
        scaling: a section of the config; None: the usual ones.
    """
    if positions > _MAX_POSITIONS:
        raise config.error(
            "max_position_embeddings",
            f"is {positions}; more than {_MAX_POSITIONS} cannot be exported: lower it",
        )
    scaling = scaling or config.section("rope_parameters") or config.section("rope_scaling")
    theta = config.number("rope_theta", 10_000.0)
    if scaling is not None:
        for kind in _KINDS_OF_LAYERS:
            if kind in scaling:
                raise scaling.error(kind, "must not be there: all layers have one rotation here")
        theta = scaling.number("rope_theta", theta)
    rotation = Rotation(_rotated(config, scaling, head_dim, partial), positions, theta)
    with np.errstate(all="ignore"):  # the check looks at the last position
        found = Rotary(_table(rotation)) if scaling is None else _scaled(rotation, scaling, config)
        last = [
            table.frequencies * np.float32(table.positions) * np.float32(table.factor)
            for table in found
            if table is not None
        ]
    if not all(np.isfinite(values).all() for values in last):
        raise (scaling or config).error(
            "rope_theta", f"is {theta:g}; with its scaling it gives angles that are not finite"
        )
    return found


def plain_rotary(head_dim: int, positions: int, theta: float) -> Rotary:
    """A rotation without scaling.

    Args:
        head_dim: numbers in a head.
        positions: rows of the tables.
        theta: base of the frequencies.
    """
    return Rotary(_table(Rotation(head_dim, positions, theta)))


def _rotated(config: ModelConfig, scaling: ModelConfig | None, head_dim: int, partial: bool) -> int:
    """The number of a head's values that are rotated."""
    key = "partial_rotary_factor"
    factor = config.number(key, 1.0)
    if scaling is not None:
        if _kind(scaling) == _PROPORTIONAL:
            return head_dim
        factor = scaling.number(key, factor)
    if factor != 1 and not partial:
        raise (scaling or config).error(key, "must be 1 to be exported")
    rotated = int(head_dim * factor)
    if rotated % HEAD_DIM_MULTIPLE or not rotated <= head_dim:
        raise (scaling or config).error(
            key, f"is {factor}, {rotated} of {head_dim}; rotary attention needs a multiple of 8"
        )
    return rotated


def _frequencies(rotation: Rotation, divisor: Float | None = None) -> Float:
    """Angles per position [rotated / 2], in float32 and in transformers' order of operations.

    Only the power is computed in float64 and rounded: float32's power differs on arm64.
    """
    exponents = np.arange(0, rotation.rotated, 2, dtype=np.float32) / np.float32(rotation.rotated)
    waves: Float = (np.float64(rotation.theta) ** exponents.astype(np.float64)).astype(np.float32)
    return np.float32(1) / (waves if divisor is None else divisor * waves)


def _table(rotation: Rotation, frequencies: Float | None = None, factor: float = 1.0) -> Table:
    if frequencies is None:
        frequencies = _frequencies(rotation)
    return Table(frequencies, rotation.positions, factor)


def _scaled(rotation: Rotation, scaling: ModelConfig, config: ModelConfig) -> Rotary:
    kind = _kind(scaling)
    if kind == "yarn":
        return Rotary(_yarn(rotation, scaling, config))
    if kind in _LONG_ROPE:
        return _long_rope(rotation, scaling, config)
    frequencies = _frequencies(rotation)
    if kind == "linear":
        frequencies = frequencies / np.float32(scaling.number("factor"))
    elif kind == _PROPORTIONAL:  # the slower ones of a head are 0
        turning = scaling.number("partial_rotary_factor", 1.0) * rotation.rotated // 2
        frequencies[int(turning) :] = 0
        frequencies = frequencies / np.float32(scaling.number("factor", 1.0))
    elif kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    elif kind == "factors":  # of a GGUF: one divisor for each frequency
        frequencies = _frequencies(rotation, _divisors(rotation, scaling, kind))
    elif kind not in _PLAIN:
        raise scaling.error(
            "rope_type",
            f"is {kind!r}; only default, linear, llama3, yarn, longrope and proportional scaling "
            "can be exported",
        )
    return Rotary(_table(rotation, frequencies))


def _kind(scaling: ModelConfig) -> str:
    return scaling.text("rope_type", scaling.text("type", "default"))


def _divisors(rotation: Rotation, scaling: ModelConfig, key: str) -> Float:
    return np.array(scaling.numbers(key, rotation.rotated // 2), np.float32)


def _llama3(frequencies: Float, scaling: ModelConfig) -> Float:
    """Llama 3.1's scaling: slows long waves by `factor`, keeps short ones, blends between."""
    factor = np.float32(scaling.number("factor"))
    low = scaling.number("low_freq_factor")
    high = scaling.number("high_freq_factor")
    trained_length = scaling.integer("original_max_position_embeddings")
    wavelengths = np.float32(2 * math.pi) / frequencies
    blend = np.clip((trained_length / wavelengths - low) / (high - low), 0, 1).astype(np.float32)
    return frequencies * (blend + (1 - blend) / factor)


def trained_positions(rotation_positions: int, scaling: ModelConfig, config: ModelConfig) -> int:
    """The context length before it was scaled.

    Args:
        rotation_positions: the context length after scaling.
        scaling: the section that scales.
        config: of the language model.
    """
    key = "original_max_position_embeddings"
    return scaling.integer(key, config.integer(key, rotation_positions))


def _yarn(rotation: Rotation, scaling: ModelConfig, config: ModelConfig) -> Table:
    """YaRN: divides slow frequencies by `factor`, keeps fast ones, blends between; scales all.

    Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models" (2023).
    """
    trained = trained_positions(rotation.positions, scaling, config)
    factor = scaling.number("factor", rotation.positions / trained)
    mscales = [scaling.factor(key) for key in ("mscale", "mscale_all_dim")]
    strength = _strength(factor)
    if all(mscales):
        own, all_dim = (_strength(factor, mscale or 0) for mscale in mscales)
        strength = own / all_dim
    strength = scaling.factor("attention_factor") or strength
    size, theta = rotation.rotated, rotation.theta
    if theta == 1:
        raise config.error("rope_theta", "is 1; YaRN needs another base")
    fast, slow = scaling.factor("beta_fast") or 32.0, scaling.factor("beta_slow") or 1.0
    low, high = (
        size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (fast, slow)
    )
    if scaling.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    places = np.arange(size // 2, dtype=np.float32)
    slowed = np.clip((places - np.float32(low)) / np.float32(high - low), 0, 1)
    divided = _frequencies(rotation, np.full(size // 2, factor, np.float32))
    frequencies = divided * slowed + _frequencies(rotation) * (1 - slowed)
    return _table(rotation, frequencies.astype(np.float32), strength)


def _strength(factor: float, mscale: float = 1.0) -> float:
    """YaRN's factor of queries and keys: attention over more positions has to be sharper."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def _long_rope(rotation: Rotation, scaling: ModelConfig, config: ModelConfig) -> Rotary:
    """LongRoPE: contexts longer than the trained length have other divisors.

    Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens" (2024).
    """
    trained = trained_positions(rotation.positions, scaling, config)
    factor = scaling.number("factor", rotation.positions / trained)
    strength = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(max(trained, 2)))
    strength = scaling.number("attention_factor", strength)
    short, long = (
        _frequencies(rotation, _divisors(rotation, scaling, name))
        for name in ("short_factor", "long_factor")
    )
    within = -(-trained // _BLOCK) * _BLOCK
    if within >= rotation.positions:
        return Rotary(_table(rotation, short, strength))
    return Rotary(
        _table(rotation._replace(positions=within), short, strength),
        _table(rotation, long, strength),
    )
