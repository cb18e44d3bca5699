"""The shipped folders load in transformers, which measures what the model card says."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.reference

from training.checkpoint import load_model, trained_tokenizer  # noqa: E402
from training.corpus import DEMO_DIR, read_held_out  # noqa: E402
from training.evaluate import bits_per_byte  # noqa: E402
from training.files import EVALUATION  # noqa: E402

MODULES = ("bisect.py", "queue.py", "shlex.py", "textwrap.py")


# One document, of two windows, takes a second; all of them are compared in `make check`.
@pytest.mark.parametrize(
    "modules", [MODULES[:1], pytest.param(MODULES, marks=pytest.mark.e2e)], ids=len
)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_transformers_measures_the_bits_that_the_card_says(
    role: str, modules: tuple[str, ...]
) -> None:
    folder = DEMO_DIR / role
    documents = [document for document in read_held_out(DEMO_DIR) if document.path in modules]
    model = load_model(folder)

    def forward(tokens: Sequence[int]) -> Any:
        return model(torch.tensor([list(tokens)])).logits[0].numpy()

    measured = bits_per_byte(forward, trained_tokenizer(folder), documents)
    evaluation = json.loads((DEMO_DIR / EVALUATION).read_text(encoding="utf-8"))
    card = evaluation["bits_per_byte"][role]["fp32"]["documents"]
    assert set(measured["documents"]) == set(modules)
    for path, bits in measured["documents"].items():
        assert bits == pytest.approx(card[path], rel=0.01)
