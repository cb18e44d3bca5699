"""Long texts in layers of true sizes, a few of each family, beside transformers in float32.

Sums of thousands of numbers differ by their order, and unscaled attention and recurrences make more
of it. Gemma 4 E2B's ten layers err by 7e-6 of the largest logit beside transformers in float64, of
which transformers' own float32 errs by 3e-6.

`pytest -m release tests/models/convert/test_true_sizes.py` takes some minutes and 5 GB of memory.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from specops.models.convert import Quantization, export_checkpoint
from tests.checkpoints import write_checkpoint
from tests.models.convert.test_families import transformers_logits
from tests.models_e2e.repositories import REPOSITORIES, Repository
from tests.passes import Float, Passes, prepared, random_chunks

pytestmark = [pytest.mark.e2e, pytest.mark.reference, pytest.mark.release]

VOCAB, LENGTH, DECODED = 512, 3000, 24
SETTLED = 2000  # tokens, behind which a recurrence may differ more


class Case(NamedTuple):
    """A published model, how many of its layers are taken, and whether it has a recurrence."""

    repository: str
    layers: int
    recurrent: bool
    changes: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "lfm2.5-1.2b": Case("LiquidAI/LFM2.5-1.2B-Instruct", 4, recurrent=False),
    "qwen3.5-0.8b": Case("Qwen/Qwen3.5-0.8B", 4, recurrent=True),
    "granite-4.0-h-micro": Case("ibm-granite/granite-4.0-h-micro", 6, recurrent=True),
    "gemma-4-e2b": Case(
        "google/gemma-4-E2B-it", 10, recurrent=False, changes={"num_kv_shared_layers": 5}
    ),
    "gemma-4-e4b": Case(
        "google/gemma-4-E4B-it", 12, recurrent=False, changes={"num_kv_shared_layers": 6}
    ),
}


def write(case: Case, folder: Path) -> Path:
    """Write the checkpoint: the published configuration with fewer layers and tokens."""
    repository = REPOSITORIES[case.repository]
    assert isinstance(repository, Repository)
    config = {**repository.config, **case.changes, "max_position_embeddings": 4096}
    config |= dict.fromkeys({"vocab_size", "vocab_size_per_layer_input"} & config.keys(), VOCAB)
    config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    layers = config["layer_types"][: case.layers]
    config |= {"num_hidden_layers": case.layers, "layer_types": layers}
    shapes = repository.shapes(config)
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith("mtp.")}
    return write_checkpoint(folder, config, shapes, seed=0)


def differences(found: Float, expected: Float) -> Float:
    """The largest difference of each token's logits, relative to the largest logit."""
    return np.abs(found - expected).max(1) / np.abs(expected).max()


@pytest.mark.parametrize("name", CASES)
def test_long_texts_have_transformers_logits_in_one_piece_and_in_chunks(
    name: str, tmp_path: Path, summary_lines: dict[str, list[str]]
) -> None:
    case = CASES[name]
    source = write(case, tmp_path / "source")
    tokens = np.random.default_rng(1).integers(1, VOCAB, LENGTH).tolist()
    model = export_checkpoint(source, tmp_path / "fp32", quantization=Quantization.parse("fp32"))
    passes = Passes(prepared(model.graph_file, tmp_path / "cache"), context=LENGTH + 72)
    whole = passes.step(0, tokens)
    pieces = [*random_chunks(tokens[:-DECODED], 2, 96), *([token] for token in tokens[-DECODED:])]
    assert np.array_equal(np.concatenate([passes.step(1, piece) for piece in pieces]), whole)
    found = differences(whole, transformers_logits(source, tokens))
    title = "texts of 3,000 tokens beside transformers, largest difference of the largest logit"
    summary_lines.setdefault(title, []).append(f"{name}: {found.max():.1e}")
    assert found[:SETTLED].max() < 1e-4
    assert found[SETTLED:].max() < (1e-3 if case.recurrent else 1e-4)
