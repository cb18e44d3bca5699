"""A head is trained as it is used, learns, continues a training, and is calibrated."""

from __future__ import annotations

import json
import resource
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

torch = pytest.importorskip("torch", reason="needs the extra `train`")

from specops.heads import training  # noqa: E402
from specops.heads.checkpoint import HeadCheckpoint, write_head  # noqa: E402
from specops.heads.layer import Target  # noqa: E402
from specops.heads.network import DistillationLoss, HeadNetwork, new_config  # noqa: E402
from specops.heads.storage import Conversation  # noqa: E402
from specops.heads.teacher import Teacher, repeated  # noqa: E402
from specops.heads.training import GUESSES, Training, acceptance, calibrate, rounds  # noqa: E402
from specops.models.folder import ModelError  # noqa: E402
from tests.eagle_heads import Reference  # noqa: E402

VOCAB, SIZE = 40, 64
PARTS = slice(4), slice(4, None)  # of a text: prompt and answer
TOKENS = [token for token in range(VOCAB) if token % 5]  # that it can guess
TARGET = Target(VOCAB, SIZE, 8, 128)
CONFIG = new_config(TARGET, len(TOKENS))
ROWS = torch.randn((VOCAB, SIZE), generator=torch.Generator().manual_seed(1))


class Stairs(Teacher):
    """A target that says token + 7 in four of five cases, and whose layers show the last token."""

    def __init__(self) -> None:
        super().__init__(TOKENS, VOCAB, torch.device("cpu"), 4)

    def read(
        self, wholes: Sequence[list[int]], counts: Sequence[int]
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        parts = [torch.cat([ROWS[whole[:-1]]] * 3, -1) for whole in wholes]
        ends = zip(wholes, counts, strict=True)
        before = torch.tensor([token for x, n in ends for token in x[len(x) - 1 - n : -1]])
        chances = torch.full((len(before), VOCAB), 0.2 / (VOCAB - 1))
        chances[torch.arange(len(before)), (before + 7) % VOCAB] = 0.8
        return parts, chances.log()

    def embed(self, tokens: list[int]) -> torch.Tensor:
        return ROWS[tokens]


def conversations(texts: int, seed: int = 0) -> list[Conversation]:
    rng, found = np.random.default_rng(seed), []
    for number in range(texts):
        tokens = [int(rng.integers(VOCAB))]
        while len(tokens) < 20 + number % 5:
            step = 7 if rng.random() < 0.8 else int(rng.integers(VOCAB))
            tokens.append((tokens[-1] + step) % VOCAB)
        prompt, answer = np.split(np.array(tokens, np.int32), [number % 4])
        found.append(Conversation(number, prompt, answer))
    return found


def new_network() -> HeadNetwork:
    return HeadNetwork(CONFIG, ROWS[TOKENS])


def test_a_lesson_has_what_the_target_makes_of_texts() -> None:
    texts = conversations(4)
    lesson = Stairs().lesson(texts)
    whole = [*texts[3].prompt.tolist(), *texts[3].tokens.tolist()]
    assert lesson.taught.shape == (4, 21)
    # Entry t guesses token t + 2; the answer begins at 3 and has 20 tokens.
    assert lesson.taught[3].nonzero().squeeze(1).tolist() == list(range(1, 21))
    assert lesson.taught[0].sum() == 18  # the first two tokens cannot be guessed
    torch.testing.assert_close(lesson.embeddings[3], ROWS[whole[1:-1]])
    torch.testing.assert_close(lesson.states[3, :, :SIZE], ROWS[whole[:-2]])
    torch.testing.assert_close(lesson.shares.sum(-1), torch.ones(len(lesson.mass)))
    came = [TOKENS.index(token) if token in TOKENS else -1 for token in whole[3:]]
    assert lesson.chosen[-20:].tolist() == came
    assert lesson.mass.min() < 0.2  # where the likeliest token cannot be guessed
    assert lesson.mass.max() > 0.9


def test_what_a_lookup_would_guess_counts_less() -> None:
    assert repeated([5, 6, 7, 5, 6, 7, 6, 8]) == [False, False, False, True, True, False, False]
    text = Conversation(0, *(np.array([5, 6, 7, 5, 6, 7, 6, 8][at], np.int32) for at in PARTS))
    lesson = Stairs().lesson([text])
    assert lesson.repeated.tolist() == [True, True, False, False]


def test_unrolled_it_computes_what_a_head_does_in_use(tmp_path: Path) -> None:
    """One guess after the other, by a reference of the format, from the text alone."""
    network, lesson = new_network(), Stairs().lesson(texts := conversations(2))
    for values in network.weights.values():
        if values.ndim == 1:
            torch.nn.init.uniform_(values, 0.5, 1.5)
    tensors = {name: values.detach().numpy() for name, values in network.weights.items()}
    tensors["d2t"] = np.array(TOKENS) - np.arange(len(TOKENS))
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    reference = Reference(tmp_path, ROWS, ROWS)
    with torch.no_grad():
        found = list(network.guess(lesson.embeddings, lesson.states, GUESSES))
        for row, item in enumerate(texts):
            whole = [*item.prompt.tolist(), *item.tokens.tolist()]
            states = [ROWS[whole]] * 3
            for begun in (0, 3, 12):
                for guess in range(GUESSES):
                    known = begun + 2
                    expected = reference.logits(whole[:known], whole[known : known + guess], states)
                    logits = network.rows @ found[guess][row, begun + guess]
                    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_the_gradient_is_that_of_the_loss() -> None:
    random = torch.Generator().manual_seed(3)
    rows = torch.randn((12, 8), generator=random)
    states = torch.randn((700, 8), generator=random, requires_grad=True)  # two blocks
    shares = torch.randn((700, 12), generator=random).softmax(-1)
    mass = torch.rand(700, generator=random)
    loss = DistillationLoss.apply(states, rows, (shares, mass), (0.3, 2.0))
    (found,) = torch.autograd.grad(2 * loss, states)
    logs = (states @ rows.T).log_softmax(-1)
    variation = (logs.exp() - shares).abs().sum(-1) / 2
    expected = (mass * (0.3 * -(shares * logs).sum(-1) + 2.0 * variation)).mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, torch.autograd.grad(2 * expected, states)[0])


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_it_learns_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: torch.dtype
) -> None:
    monkeypatch.setattr(training, "_WARM_UP", 10)
    monkeypatch.setattr(training, "_RATE", 4e-3)  # it is a small head, and there are 100 steps
    teacher, unseen, reported = Stairs(), conversations(40, seed=1), list[str]()

    def trained(seconds: float) -> tuple[HeadNetwork, Training]:
        network = new_network()
        network.precision = precision
        return network, Training(
            network,
            teacher,
            conversations(60),
            unseen,
            seconds=seconds,
            checkpoint=tmp_path / "training.pt",
            tell=reported.append,
            clock=count().__next__,
        )

    network, first = trained(20)
    before = acceptance(rounds(network, teacher, unseen))
    first.run()
    half = {name: values.clone() for name, values in network.weights.items()}
    network, second = trained(120)
    assert "continues" in reported[-1]
    assert (second.spent, second.seen) == (first.spent, first.seen)
    for name, values in network.weights.items():
        torch.testing.assert_close(values, half[name])
    second.run()
    assert second.spent == 120
    assert second.seen > 3 * first.seen
    found = rounds(network, teacher, unseen)
    reached = acceptance(found)
    assert before[0] < 0.2
    # Four fifths of the likeliest tokens can be guessed.
    assert reached[0] > 0.45
    assert min(reached[1:]) > 0.4  # behind right ones
    assert "guesses right" in reported[-1]
    (factor, summand), *more = calibrate(found)
    assert len(more) == GUESSES - 1
    sure, right, _ = found[0]
    promised = torch.sigmoid(factor * torch.logit(sure, 1e-4) + summand)
    assert abs(float(promised.mean() - right.mean())) < 0.05


def test_a_damaged_training_and_a_full_disk_are_named(tmp_path: Path) -> None:
    file = tmp_path / "training.pt"

    def trained() -> Training:
        return Training(
            new_network(),
            Stairs(),
            conversations(20),
            conversations(8, seed=1),
            seconds=3,
            checkpoint=file,
            tell=lambda text: None,
            clock=count().__next__,
        )

    trained().run()
    whole = file.read_bytes()
    for damage in (b"", whole[:-100], b"no training", bytes(len(whole))):
        file.write_bytes(damage)
        with pytest.raises(ModelError, match=r"training\.pt is damaged.* remove it"):
            trained()
    file.unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="No space left on device") as refused:
            trained().run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert refused.value.filename == str(file)
    assert not list(tmp_path.iterdir())


def test_what_is_written_is_a_checkpoint_in_8_bits(tmp_path: Path) -> None:
    network = new_network()
    weights = {name: values.detach().numpy() for name, values in network.weights.items()}
    write_head(tmp_path, CONFIG | {"calibration": [[1.0, 0.0]]}, weights, TOKENS)
    checkpoint = HeadCheckpoint(tmp_path)
    assert checkpoint.tensors["fc.weight"].dtype == "I8"
    shapes = {name: tuple(values.shape) for name, values in network.weights.items()}
    checkpoint.expect(shapes, ("d2t", "t2d"))
    for name, values in network.weights.items():
        if values.ndim > 1:
            (part,) = checkpoint.matrix(name).parts
            read = torch.from_numpy(part)
            largest = values.unflatten(1, (-1, 64)).abs().amax(-1, keepdim=True)
            error = (read - values).unflatten(1, (-1, 64)).abs()
            assert (error <= largest / 250).all()
