"""The shipped folders load in transformers, which measures what the model card says."""

import json

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.reference

from training.checkpoint import trained_tokenizer  # noqa: E402
from training.corpus import DEMO_DIR  # noqa: E402
from training.evaluate import bits_per_byte  # noqa: E402
from training.files import EVALUATION, REFERENCE  # noqa: E402
from training.reference import MODULES, sample, transformers_forward  # noqa: E402


# One document, of two windows, takes a second; all of them are compared in `make check`.
@pytest.mark.parametrize(
    "modules", [MODULES[:1], pytest.param(MODULES, marks=pytest.mark.e2e)], ids=len
)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_transformers_measures_the_bits_that_the_card_says(
    role: str, modules: tuple[str, ...]
) -> None:
    folder = DEMO_DIR / role
    documents = [document for document in sample(DEMO_DIR) if document.path in modules]
    measured = bits_per_byte(transformers_forward(folder), trained_tokenizer(folder), documents)
    evaluation = json.loads((DEMO_DIR / EVALUATION).read_text(encoding="utf-8"))
    card = evaluation["bits_per_byte"][role]["fp32"]["documents"]
    assert set(measured["documents"]) == set(modules)
    for path, bits in measured["documents"].items():
        assert bits == pytest.approx(card[path], rel=0.01)
    if role == "target" and modules == MODULES:
        reference = json.loads((DEMO_DIR / REFERENCE).read_text(encoding="utf-8"))
        assert measured["all"] == pytest.approx(reference["transformers_float16_weights"], rel=1e-3)
        assert measured["all"] == pytest.approx(reference["checkpoint_float32"], rel=1e-3)
