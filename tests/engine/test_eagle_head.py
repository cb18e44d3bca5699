"""An EAGLE-3 head computes what the format says, whatever happens to its requests."""

from dataclasses import replace
from itertools import count, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from specops.config import Settings
from specops.engine import loading
from specops.engine.engine import Engine
from specops.request import GenerationRequest, SamplingParams
from specops.speculation.drafters.base import DraftContext
from specops.speculation.drafters.eagle import EagleDrafter
from tests.checkpoints import make_checkpoint
from tests.eagle_heads import LAYERS, Reference, write_head
from tests.generating import run

DEPTH = 7
SCALING = {"rope_type": "linear", "factor": 4.0}
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "speculators": {
        "hidden": 48,
        "spelling": "layers.0.",
        "nested": True,
        "embedding": True,
        "biases": True,
        "norm_before_fc": True,
        "layer_types": ["sliding_attention"],
        "sliding_window": 24,
        "use_sliding_window": True,
    },
    "3.1": {
        "output": False,
        "fc_norm": True,
        "norm_before_fc": True,
        "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
        "rope_scaling": SCALING,
    },
    "deepspec": {
        "architectures": ["Qwen3Eagle3Model"],
        "spelling": "layers.0.",
        "states": 5,
        "embedding": True,
        "output": False,
        "tie_word_embeddings": True,
        "head_norms": True,
        "target_layer_ids": [-1, 1, 3, 6, 6],
    },
    "without-fc": {
        "states": 0,
        "rows": 320,
        "d2t": False,
        "eagle_aux_hidden_state_layer_ids": [5],
        "norm_before_residual": True,
    },
}
_ids = count()
SAMPLED = SamplingParams(1.0, top_k=5, seed=3)


TARGETS: dict[str, dict[str, Any]] = {"llama": {}, "lfm2": {"attention": (2, 5)}}


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama's layers, or what the test's parameter names."""
    kind, folder = getattr(request, "param", "llama"), tmp_path_factory.mktemp("eagle")
    sizes = {"layers": LAYERS, "vocab": 320, "context": 256}
    return make_checkpoint(folder / "target", kind, **TARGETS[kind], **sizes, seed=2)


def exact(target: Path, cache_dir: Path) -> Settings:
    """Everything in fp32, and guesses in long rows."""
    return Settings(
        target=str(target),
        quant="fp32",
        draft_quant="fp32",
        kv_dtype="fp32",
        cache_dir=cache_dir,
        threads=1,
        slots=3,
        kv_tokens=320,
        prefix_cache="all",
        max_batched_tokens=48,
        max_k_draft=DEPTH,
    )


@pytest.fixture(scope="module")
def settings(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return exact(target, tmp_path_factory.mktemp("cache"))


class Guess(NamedTuple):
    """One guess: the text, the guesses before it, and the logits that it comes from."""

    text: list[int]
    before: list[int]
    logits: np.ndarray[Any, Any]


@pytest.fixture
def guesses(monkeypatch: pytest.MonkeyPatch) -> list[Guess]:
    """All guesses that heads make."""
    seen: list[Guess] = []
    choose = EagleDrafter._guess

    def watched(
        self: EagleDrafter, guess: int, context: DraftContext, logits: np.ndarray[Any, Any]
    ) -> None:
        before = list(self._latest[context.slot].tokens)
        seen.append(Guess(list(context.text), before, logits.copy()))
        choose(self, guess, context, logits)

    monkeypatch.setattr(EagleDrafter, "_guess", watched)
    return seen


def request(prompt: list[int], **fields: object) -> GenerationRequest:
    given: dict[str, Any] = {
        **{"max_new_tokens": 40, "ignore_eos": True, "k_draft": DEPTH, "adaptive": False},
        **{"drafter": "head", **fields},
    }
    return GenerationRequest(request_id=str(next(_ids)), prompt_tokens=tuple(prompt), **given)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 320, length).tolist()


def texts(engine: Engine, *requests: GenerationRequest) -> tuple[list[list[int]], int, int]:
    """What requests brought, with their preemptions and the tokens taken from the cache."""
    served = run(engine, *requests)
    stats = [served.stats(item) for item in requests]
    return (
        [served.tokens(item) for item in requests],
        sum(item.preemptions for item in stats),
        sum(item.cached_prompt_tokens for item in stats),
    )


def everything(engine: Engine, **fields: Any) -> list[list[int]]:
    """The texts of requests beside each other, that preempt each other, and that begin alike."""
    beside = [request(prompt(seed, 5 + 40 * seed), **fields) for seed in range(3)]
    found, *_ = texts(engine, *beside)
    crowded = {"max_new_tokens": 90, **fields}
    more, preempted, _ = texts(
        engine, *(request(prompt(seed, 70), **crowded) for seed in (3, 4, 5))
    )
    assert preempted
    found += more
    for tail in ([], [8] * 9):
        for length in (64, 65, 70):
            alike = request(prompt(5, length) + tail, **{**fields, "max_new_tokens": 6})
            more, _, cached = texts(engine, alike)
            assert cached >= 56
            found += more
    more, *_ = texts(engine, request([1, *prompt(5, 70)[1:]], **{**fields, "max_new_tokens": 6}))
    return found + more


@pytest.mark.parametrize(
    ("target", "kind"), [*product(["llama"], HEADS), ("lfm2", "plain")], indirect=["target"]
)
def test_guesses_are_the_reference_s(
    kind: str, target: Path, settings: Settings, tmp_path: Path, guesses: list[Guess]
) -> None:
    """In chains, among others, after rejections and preemptions, and behind cached beginnings."""
    torch = pytest.importorskip("torch", reason="needs the extra `reference`")
    transformers = pytest.importorskip("transformers")
    folder = write_head(tmp_path / kind, target=target, **HEADS[kind])
    everything(Engine.load(replace(settings, draft=str(folder))))
    assert max(len(item.before) for item in guesses) == DEPTH - 1
    model = transformers.AutoModelForCausalLM.from_pretrained(target).float().eval()
    tables = model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data
    reference = Reference(folder, *tables)
    for guess in (*guesses[:: len(guesses) // 20], *guesses[-40::4]):
        with torch.no_grad():
            states = model(torch.tensor([guess.text]), output_hidden_states=True).hidden_states
            chosen = [states[layer][0] for layer in reference.layers]
            expected = reference.logits(guess.text, guess.before, chosen).numpy()
        np.testing.assert_allclose(guess.logits, expected, atol=1e-4)


@pytest.mark.parametrize("target", TARGETS, indirect=True)
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "seeded"])
def test_output_is_that_of_plain_decoding(
    sampling: SamplingParams, target: Path, settings: Settings, tmp_path: Path
) -> None:
    head = write_head(tmp_path / "head", target=target)
    engine = Engine.load(replace(settings, quant="int8-32", draft_quant="int4-32", draft=str(head)))
    plain = everything(engine, drafter="none", sampling=sampling)
    for fields in ({"drafter": "head"}, {"drafter": "cascade", "adaptive": True}):
        assert everything(engine, sampling=sampling, **fields) == plain
    # Without the conversion's key: of generations with one name the unused ones are removed.
    kept = {path.name[:-17] for path in (settings.cache_dir / "prepacked").iterdir()}
    assert {"target-head", "target-fusion"} <= kept


@pytest.mark.parametrize("kind", ["plain", "without-fc"])
def test_the_plan_counts_each_copy_of_the_states(
    kind: str,
    target: Path,
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned: list[int] = []
    counted = loading.state_bytes

    def watched(*arguments: Any) -> int:
        planned.append(counted(*arguments))
        return planned[-1]

    monkeypatch.setattr(loading, "state_bytes", watched)
    head = write_head(tmp_path / kind, target=target, **HEADS[kind])
    engine = Engine.load(replace(settings, draft=str(head)))
    (drafter,) = engine.scheduler.drafters["head"]
    assert isinstance(drafter, EagleDrafter)
    for slot in range(settings.slots):
        drafter.begin(slot, [1, 2], "")
    arrays = [slot.waiting for slot in drafter._slots.values()]
    arrays += [engine.scheduler.target._states, drafter.runner.given_states]
    arrays += [] if drafter._fusion is None else [drafter._fusion.states]
    assert planned == [sum(array.nbytes for array in arrays)]
