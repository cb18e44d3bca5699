"""Forward passes: the same sequence gives the same logits however it is cut and batched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from specops.decoder import Decoder, Logits
from specops.exactness import exact_align
from specops.session import ModelLoadError, open_session, share_threads

TOKENS = np.random.default_rng(0).integers(1, 320, 100).tolist()


def feed(decoder: Decoder, row: int, widths: list[int], align: int = 1) -> Logits:
    """Logits [S, V] of TOKENS, cut into passes."""
    decoder.cache.truncate(row, 0)
    parts, start = [], 0
    for width in widths:
        parts.append(decoder.extend(row, TOKENS[start : start + width], align=align).copy())
        start += width
    return np.concatenate(parts)


def close(left: Logits, right: Logits) -> bool:
    # Activations are quantized: a last bit's difference can become a step of one of 255.
    return float(np.abs(left - right).max()) <= 0.05 * float(np.abs(right).max())


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 7, 8, 9, 32])
def test_aligned_passes_are_bit_identical_however_a_sequence_is_cut(
    decoder: Decoder, width: int
) -> None:
    align = exact_align(decoder)
    assert align is not None
    whole = feed(decoder, 0, [32, 32], align)
    cut = feed(decoder, 1, [width] * (64 // width), align)
    assert np.array_equal(cut, whole[: len(cut)])


def test_the_measured_alignment_leaves_the_row_empty(decoder: Decoder) -> None:
    exact_align(decoder)
    assert decoder.cache.lengths == [0] * decoder.cache.rows


def test_kernels_that_never_agree_promise_nothing(decoder: Decoder) -> None:
    """Noise in the last bits of every pass, as from sums in an order that depends on its width."""
    extend = decoder.extend

    def noisy(row: int, tokens: list[int], *, align: int = 1, logits: int | None = None) -> Logits:
        return extend(row, tokens, align=align, logits=logits) * np.float32(1 + len(tokens) * 1e-6)

    decoder.extend = noisy  # type: ignore[method-assign, assignment]
    assert exact_align(decoder) is None


def test_single_tokens_agree_with_a_prefill(decoder: Decoder) -> None:
    assert close(feed(decoder, 0, [1] * 40), feed(decoder, 1, [32, 8]))


def test_rows_of_different_lengths_decode_together_as_alone(decoder: Decoder) -> None:
    lengths = [20, 33, 7]
    for row, length in enumerate(lengths):
        feed(decoder, row, [length] if length <= 32 else [32, length - 32])
    together = decoder.decode(0, [5, 6, 7]).copy()
    assert decoder.cache.lengths == [21, 34, 8]
    for row, length in enumerate(lengths):
        decoder.cache.truncate(row, length)
        assert close(decoder.decode(row, [5 + row]), together[row : row + 1])


def test_a_pass_leaves_other_rows_alone(decoder: Decoder) -> None:
    expected = feed(decoder, 0, [20, 1])[-1]
    feed(decoder, 0, [20])
    feed(decoder, 1, [32, 32])
    decoder.decode(1, [3, 4])
    assert np.array_equal(decoder.extend(0, TOKENS[20:21])[0], expected)


def test_rejected_tokens_leave_no_trace(decoder: Decoder) -> None:
    feed(decoder, 0, [20])
    expected = decoder.extend(0, TOKENS[20:24]).copy()
    decoder.cache.truncate(0, 20)
    decoder.extend(0, [1, 2, 3, 4, 5, 6])
    decoder.cache.truncate(0, 20)
    assert np.array_equal(decoder.extend(0, TOKENS[20:24]), expected)


def test_spare_tokens_are_rolled_back(decoder: Decoder) -> None:
    logits = decoder.extend(0, TOKENS[:3], align=2)
    assert logits.shape == (3, decoder.vocab_size)
    assert decoder.cache.lengths[0] == 3


@pytest.mark.parametrize("asked", [1, 2, 7, 31, 40])
@pytest.mark.parametrize("width", [31, 32])
def test_the_last_tokens_logits_have_the_same_bits_alone(
    decoder: Decoder, asked: int, width: int
) -> None:
    """What prefill asks for: the head and the last feed-forward see these tokens alone."""
    align = exact_align(decoder)
    assert align is not None
    tokens = TOKENS[:width]
    whole = decoder.extend(0, tokens, align=align).copy()
    assert np.array_equal(decoder.extend(1, tokens, align=align, logits=asked), whole[-asked:])
    assert decoder.cache.lengths[:2] == [width, width]
    after = decoder.extend(0, TOKENS[40:44]).copy()
    assert np.array_equal(decoder.extend(1, TOKENS[40:44]), after)


def test_a_graph_that_knows_no_cut_computes_all_logits(tiny_pair: Path, tmp_path: Path) -> None:
    """Graphs that others published have no `logits_start`."""
    share_threads(2)
    model = onnx.load(tiny_pair / "target" / "onnx" / "int8-128" / "model.onnx")
    names = [value.name for value in model.graph.input]
    del model.graph.input[names.index("logits_start")]
    onnx.save(model, tmp_path / "model.onnx")
    uncut = Decoder(open_session(tmp_path / "model.onnx"), rows=2, capacity=32, max_width=32)
    whole = uncut.extend(0, TOKENS[:20]).copy()
    assert np.array_equal(uncut.extend(1, TOKENS[:20], logits=3), whole[-3:])


def test_a_row_takes_its_capacity_and_no_more(decoder: Decoder) -> None:
    for _ in range(decoder.cache.capacity // 32):
        decoder.extend(0, TOKENS[:32])
    with pytest.raises(ValueError, match="do not fit"):
        decoder.decode(0, [1])
    assert decoder.cache.lengths[0] == decoder.cache.capacity


def test_a_pass_wider_than_planned_is_refused(decoder: Decoder) -> None:
    with pytest.raises(ValueError, match="at most 32 tokens"):
        decoder.extend(0, TOKENS[:33])


def test_a_missing_graph_is_named(tmp_path: Path) -> None:
    share_threads(2)
    with pytest.raises(ModelLoadError, match=r"nothing\.onnx"):
        open_session(tmp_path / "nothing.onnx")


def test_the_thread_pool_cannot_be_resized() -> None:
    share_threads(2)
    with pytest.raises(ModelLoadError, match="2 threads, not 7"):
        share_threads(7)
