"""What is shipped: sizes, and the promises of the model card."""

import json
import lzma
from typing import Any

import pytest

from specops.models.layout import parts_of
from training.card import render
from training.corpus import DEMO_DIR, read_held_out
from training.evaluate import QUANTIZATIONS, SHIPPED
from training.files import CARD, EVALUATION, LICENCE

MAX_BYTES = 40_000_000


def figures(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DEMO_DIR / name).read_text(encoding="utf-8"))
    return content


def test_the_whole_pair_fits_its_budget() -> None:
    files = [file for file in DEMO_DIR.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < MAX_BYTES


def test_the_target_is_large_enough_and_the_draft_a_tenth_of_it() -> None:
    parameters = figures(EVALUATION)["parameters"]
    assert parameters["target"] >= 8_000_000
    assert parameters["draft"] * 10 <= parameters["target"]


@pytest.mark.parametrize("role", ["target", "draft"])
def test_each_model_is_a_hugging_face_folder_with_its_graph(role: str) -> None:
    folder = DEMO_DIR / role
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).is_file()
    manifest = json.loads((folder / "onnx" / SHIPPED / "specops.json").read_text())
    assert (folder / "onnx" / SHIPPED / manifest["onnx_file"]).is_file()
    assert manifest["num_parameters"] == figures(EVALUATION)["parameters"][role]
    config = json.loads((folder / "config.json").read_text())
    assert manifest["context_length"] == config["max_position_embeddings"]
    # As of a conversion to other weights: by this `specops draft make` knows its own texts.
    assert manifest["source_digest"] == parts_of(folder).digest()


def test_target_and_draft_share_one_tokenizer() -> None:
    files = [*DEMO_DIR.glob("*/tokenizer.json"), *DEMO_DIR.glob("*/onnx/*/tokenizer.json")]
    assert len(files) == 4
    assert len({file.read_bytes() for file in files}) == 1


def test_the_card_is_what_its_figures_render_to() -> None:
    assert (DEMO_DIR / CARD).read_text(encoding="utf-8") == render()


def test_the_figure_for_xz_is_the_size_of_the_shipped_archive() -> None:
    archive = (DEMO_DIR / "heldout.txt.xz").read_bytes()
    xz = 8 * len(archive) / len(lzma.decompress(archive))
    assert figures(EVALUATION)["xz_bits_per_byte"] == pytest.approx(xz, abs=1e-5)


def test_the_shipped_target_beats_xz_by_15_percent() -> None:
    measured = figures(EVALUATION)
    for name in ("fp32", SHIPPED):
        bits = measured["bits_per_byte"]["target"][name]["all"]
        assert bits <= 0.85 * measured["xz_bits_per_byte"]


def test_the_figures_cover_every_held_out_document_and_quantization() -> None:
    measured = figures(EVALUATION)["bits_per_byte"]
    sizes = {document.path: len(document.text.encode()) for document in read_held_out()}
    for role in ("target", "draft"):
        assert set(measured[role]) == set(QUANTIZATIONS)
        for bits in measured[role].values():
            assert set(bits["documents"]) == set(sizes)
            total = sum(bits["documents"][path] * size for path, size in sizes.items())
            assert bits["all"] == pytest.approx(total / sum(sizes.values()), abs=1e-4)


def test_the_licence_of_the_held_out_text_is_shipped_with_it() -> None:
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (DEMO_DIR / LICENCE).read_text(encoding="utf-8")
