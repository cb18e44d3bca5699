"""The rotary table: cosines and sines for every position, as attention reads them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from specops.models.convert.model_config import ModelConfig

Float = NDArray[np.float32]

_HEAD_DIM_MULTIPLE = 8  # the limit of `specops.Attention`


def rotary_table(
    config: ModelConfig, head_dim: int, positions: int, *, partial: bool = False
) -> tuple[Float, Float]:
    """cos and sin, each [positions, rotated / 2] float32, for halves rotated against each other.

    Reads transformers 5's `rope_parameters` or the older `rope_theta` with `rope_scaling`.
    `rotated` is all of a head, or, where the family is `partial`, `partial_rotary_factor` of it.
    Raises ExportError for a scaling other than default, linear and llama3, and for heads
    that the operator cannot rotate.
    """
    if head_dim % _HEAD_DIM_MULTIPLE:
        raise config.error("head_dim", f"is {head_dim}; rotary attention needs a multiple of 8")
    scaling = config.section("rope_parameters") or config.section("rope_scaling")
    theta = config.number("rope_theta", 10_000.0)
    if scaling is not None:
        theta = scaling.number("rope_theta", theta)
    rotated = _rotated(config, scaling, head_dim, partial)
    # float32 throughout, in the order in which transformers computes it
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    frequencies = np.float32(1) / np.float32(theta) ** exponents
    if scaling is not None:
        frequencies = _scaled(frequencies, scaling, config)
    angles = np.outer(np.arange(positions, dtype=np.float32), frequencies)
    return np.cos(angles), np.sin(angles)


def _rotated(config: ModelConfig, scaling: ModelConfig | None, head_dim: int, partial: bool) -> int:
    """How many of a head's values are rotated, from the first one on."""
    key = "partial_rotary_factor"
    factor = config.number(key, 1.0)
    if scaling is not None:
        factor = scaling.number(key, factor)
    if factor != 1 and not partial:
        raise (scaling or config).error(key, "must be 1 to be exported")
    rotated = int(head_dim * factor)
    if rotated % _HEAD_DIM_MULTIPLE or not rotated <= head_dim:
        raise (scaling or config).error(
            key, f"is {factor}, {rotated} of {head_dim}; rotary attention needs a multiple of 8"
        )
    return rotated


def _scaled(frequencies: Float, scaling: ModelConfig, config: ModelConfig) -> Float:
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / np.float32(scaling.number("factor"))
    if kind == "llama3":
        return _llama3(frequencies, scaling)
    if kind == "factors":  # of a GGUF: each frequency's own divisor
        factors = scaling.numbers("factors", len(frequencies))
        return np.divide(frequencies, np.array(factors, np.float32), dtype=np.float32)
    raise scaling.error(
        "rope_type", f"is {kind!r}; only default, linear and llama3 scaling can be exported"
    )


def _llama3(frequencies: Float, scaling: ModelConfig) -> Float:
    """Llama 3.1's scaling: long waves are slowed by `factor`, short ones kept, between blended."""
    factor = np.float32(scaling.number("factor"))
    low = scaling.number("low_freq_factor")
    high = scaling.number("high_freq_factor")
    trained_length = scaling.integer("original_max_position_embeddings")
    wavelengths = np.float32(2 * math.pi) / frequencies
    blend = np.clip((trained_length / wavelengths - low) / (high - low), 0, 1).astype(np.float32)
    return frequencies * (blend + (1 - blend) / factor)
