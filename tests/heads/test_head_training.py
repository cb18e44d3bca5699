"""A head learns from texts of its target, continues a training, and is calibrated."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra `train`")

from specops.heads.examples import Examples, frequent_tokens  # noqa: E402
from specops.heads.export import write_head  # noqa: E402
from specops.heads.network import HeadNetwork  # noqa: E402
from specops.heads.storage import Conversation  # noqa: E402
from specops.heads.training import Training, acceptance, calibrate, guesses, new_network  # noqa: E402
from specops.models.graph.prepack import prepack  # noqa: E402
from specops.models.head_folder import HeadFolder  # noqa: E402
from specops.runtime.model_runner import DraftHead  # noqa: E402
from specops.runtime.session import open_session  # noqa: E402
from tests.draft_heads import random_weights  # noqa: E402

VOCAB, SIZE, TABLE = 40, 64, 32
ROWS = np.random.default_rng(1).normal(size=(VOCAB, SIZE)).astype(np.float32)


def conversations(texts: int, seed: int = 0) -> list[Conversation]:
    """Texts in which token + 7 follows in four of five cases; the states show the next token."""
    rng, found = np.random.default_rng(seed), []
    for number in range(texts):
        tokens = [int(rng.integers(VOCAB))]
        while len(tokens) < 20:
            step = 7 if rng.random() < 0.8 else int(rng.integers(VOCAB))
            tokens.append((tokens[-1] + step) % VOCAB)
        states = ROWS[tokens] * 0.3 + rng.normal(size=(20, SIZE)) * 0.1
        found.append(
            Conversation(
                number, np.zeros(1, np.int32), np.array(tokens, np.int32), states.astype(np.float16)
            )
        )
    return found


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return frequent_tokens(conversations(60), TABLE)


@pytest.fixture(scope="module")
def examples(tokens: list[int]) -> tuple[Examples, Examples]:
    learnt, unseen = conversations(60), conversations(12, seed=1)
    return tuple(Examples.of(part, tokens, ROWS[tokens]) for part in (learnt, unseen))  # type: ignore[return-value]


def test_examples_are_positions_with_what_comes_next(
    tokens: list[int], examples: tuple[Examples, Examples]
) -> None:
    found, first = examples[0], conversations(60)[0].tokens.tolist()
    assert len(found) == 60 * 19
    assert found.followed.sum() == 60 * 18
    codes = [tokens.index(token) if token in tokens else TABLE for token in first]
    assert found.codes[:19].tolist() == codes[:-1]
    assert found.chosen[:19].tolist() == codes[1:]
    outside = found.chosen == TABLE
    assert outside.any()
    assert (found.labels[outside, 0] == TABLE).all()
    assert (found.probs.sum(1) <= 1.0001).all()


def test_it_learns_and_goes_on_where_it_stopped(
    tmp_path: Path, examples: tuple[Examples, Examples], tokens: list[int]
) -> None:
    rows, reported = torch.from_numpy(ROWS[tokens]), list[str]()

    def training(seconds: float) -> tuple[HeadNetwork, Training]:
        network = new_network(examples[0], rows)
        file = tmp_path / "training.pt"
        return network, Training(
            network,
            *examples,
            seconds=seconds,
            checkpoint=file,
            tell=reported.append,
            clock=count().__next__,
        )

    network, first = training(20)
    before = acceptance(network, examples[1]).first
    first.run()
    half = {name: value.clone() for name, value in network.state_dict().items()}
    network, second = training(60)
    assert "continues" in reported[-1]
    for name, value in network.state_dict().items():
        torch.testing.assert_close(value, half[name])
    second.run()
    reached = acceptance(network, examples[1])
    assert before < 0.2
    assert reached.first > 0.5
    assert "first guess right" in reported[-1]
    _check_calibration(network, examples[1])


def _check_calibration(network: HeadNetwork, unseen: Examples) -> None:
    (factor, summand), _ = calibrate(network, unseen)
    sure, right = guesses(network, unseen)
    promised = torch.sigmoid(factor * torch.logit(sure[:, 0], 1e-4) + summand)
    assert abs(float(promised.mean() - right[:, 0].float().mean())) < 0.05


def test_the_written_graph_computes_what_the_network_does(tmp_path: Path) -> None:
    rng, rows = np.random.default_rng(2), ROWS[:TABLE]
    weights = random_weights(rows)
    network = HeadNetwork(torch.from_numpy(rows), 1.0)
    state = {name: torch.from_numpy(value) for name, value in weights.items() if name != "table"}
    network.load_state_dict(
        state | {"rows": torch.from_numpy(rows), "other": torch.from_numpy(weights["table"][-1:])}
    )
    write_head(HeadFolder(tmp_path, "m", VOCAB, SIZE, tuple(range(TABLE)), ((1, 0),)), weights)
    prepack(tmp_path / "head.onnx", tmp_path / "laid-out.onnx")
    session = open_session(tmp_path / "laid-out.onnx")
    head = DraftHead(session, num_slots=4, hidden_size=SIZE, table_size=TABLE)
    for some in (3, 1, 3):
        head.codes[:] = rng.integers(0, TABLE + 1, 4)
        head.states[:] = rng.normal(size=(4, SIZE))
        best, sure = head.guess(some)
        with torch.no_grad():
            logits, states = network(
                torch.from_numpy(head.codes[:some]), torch.from_numpy(head.states[:some])
            )
        shares = logits.softmax(-1).numpy()
        likely = shares[:, :-1].max(1)
        np.testing.assert_allclose(shares[np.arange(some), best], likely, atol=0.1)
        np.testing.assert_allclose(sure, likely, atol=0.1)
        np.testing.assert_allclose(head.next_states[:some], states.numpy(), atol=0.1)
