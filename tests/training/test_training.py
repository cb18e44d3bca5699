"""The training itself, at toy size: a restart loses nothing."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.reference

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from training.checkpoint import load_model, new_model  # noqa: E402
from training.data import Sampler  # noqa: E402
from training.distill import Distillation  # noqa: E402
from training.presets import PRESETS, Preset  # noqa: E402
from training.pretrain import Target  # noqa: E402
from training.runtime import Budget  # noqa: E402
from training.tokenizer import train_tokenizer  # noqa: E402

TINY = LlamaConfig(
    **{"vocab_size": 300, "max_position_embeddings": 64, "tie_word_embeddings": True},
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
)
PRESET = Preset(TINY, TINY, target_tokens=16 * 8 * 30, draft_tokens=16 * 8 * 30,
                short=(16, 8), long=(32, 4))  # fmt: skip


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toy models run before they would be compiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    torch.manual_seed(0)


def random_model() -> LlamaForCausalLM:
    model = new_model(TINY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2).round_(decimals=2)
    return model


def arrays() -> dict[str, np.ndarray]:
    pattern = np.tile(np.arange(20, dtype=np.uint16), 400)
    return {"library": pattern, "tests": pattern[::-1].copy(), "samples": pattern}


def make_target(file: Path) -> Target:
    return Target(PRESET, Sampler(arrays(), 0), Budget(PRESET.target_tokens), file)


def test_training_learns_and_a_restart_ends_where_the_unbroken_run_does(tmp_path: Path) -> None:
    unbroken = make_target(tmp_path / "unbroken.pt")
    broken = make_target(tmp_path / "broken.pt")
    broken.model.load_state_dict(unbroken.model.state_dict())
    losses = [unbroken.train_step()[0] for _ in range(20)]
    assert losses[-1] < losses[0] - 1
    for _ in range(7):
        broken.train_step()
    broken.save()
    resumed = make_target(tmp_path / "broken.pt")
    resumed.resume()
    again = [resumed.train_step()[0] for _ in range(13)]
    assert again == losses[7:]
    assert resumed.budget.tokens_done == unbroken.budget.tokens_done


def test_a_stopped_training_goes_on_to_the_end_of_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = threading.Event()
    stop.set()
    monkeypatch.setattr("training.loop.stop_signal", lambda: stop)
    with pytest.raises(SystemExit, match="continues from here"):
        make_target(tmp_path / "target.pt").finish(lambda now, smooth: "")
    stop.clear()
    target = make_target(tmp_path / "target.pt")
    target.finish(lambda now, smooth: f"loss {now[0]} smooth {smooth[0]}")
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "loss" in line]
    assert [int(words[1]) for words in lines] == list(range(2, 31))
    losses, means = ([float(words[index]) for words in lines] for index in (3, 5))
    assert means[0] == losses[0]
    assert means[1] == pytest.approx(0.95 * losses[0] + 0.05 * losses[1])
    target.write(train_tokenizer(["a"], vocab_size=300), tmp_path / "target", 1, test_tokens=5)
    record = json.loads((tmp_path / "target.json").read_text())
    assert (record["steps"], record["tokens"]) == (30, PRESET.target_tokens)
    assert (record["seed"], record["test_tokens"], record["threads"]) == (0, 5, 1)
    weights = load_model(tmp_path / "target").state_dict()
    assert all(
        torch.equal(weights[name], weight.half().float())
        for name, weight in target.model.state_dict().items()
    )


def test_distillation_brings_the_draft_to_the_target(tmp_path: Path) -> None:
    target = random_model().eval().requires_grad_(False)
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    sampler, budget = Sampler(arrays(), 0), Budget(PRESET.draft_tokens)
    run = Distillation(PRESET, target, sampler, budget, tmp_path / "draft.pt")
    divergences = [run.train_step()[0] for _ in range(30)]
    assert all(divergence > 0 for divergence in divergences)
    assert divergences[-1] < 0.7 * divergences[0]
    assert all(torch.equal(before[name], weight) for name, weight in target.state_dict().items())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_keep_the_pair_in_proportion_and_the_quantization_in_blocks(name: str) -> None:
    preset = PRESETS[name]
    with torch.device("meta"):
        sizes = [new_model(config).num_parameters() for config in (preset.target, preset.draft)]
    assert 8_000_000 <= sizes[0] <= 60_000_000
    assert sizes[1] * 10 <= sizes[0]
    assert preset.target.vocab_size == preset.draft.vocab_size
    for config in (preset.target, preset.draft):
        assert config.hidden_size % 128 == config.intermediate_size % 128 == 0
        assert preset.long[0] == config.max_position_embeddings
