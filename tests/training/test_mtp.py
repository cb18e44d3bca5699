"""The block that is trained for measurements is the one that the service computes."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.reference

from tests.mtp_blocks import Reference  # noqa: E402
from training import mtp  # noqa: E402


def test_a_block_guesses_in_training_what_its_checkpoint_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 64}
    for name, size in sizes.items():
        monkeypatch.setitem(mtp.CONFIG, name, size)
    torch.manual_seed(0)
    model = mtp.Model().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
        model.half().float().save(tmp_path)
        tokens = torch.arange(3, 60, 5)
        states, outputs = model.outputs(tokens[None])
        rows = model.decoder.model.embed_tokens.weight
        expected = Reference(tmp_path).logits(tokens.tolist(), [], states[0])
    torch.testing.assert_close(rows @ outputs[0, -1], expected, atol=1e-4, rtol=1e-4)
