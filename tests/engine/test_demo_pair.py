"""The bundled pair on held-out prompts: the output is the target's own, whatever was drafted."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chi2_contingency

from specops.config import Settings
from specops.engine.engine import Engine
from specops.request import GenerationRequest, SamplingParams
from tests.conftest import THREADS
from tests.generating import run
from tests.step_costs import Stopwatch, steps
from training.corpus import read_prompts

SETTINGS = Settings(model="demo", threads=THREADS)
DEMO = SETTINGS.models_dir / "demo"
PROMPTS = read_prompts(DEMO)
Counts = NDArray[np.int64]
PROMPT_TOKENS = 48  # enough for suffixes to repeat; prefill is not what is tested here
_ids = count()


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo-cache")


@pytest.fixture(scope="module")
def engine(cache_dir: Path) -> Engine:
    return Engine.load(replace(SETTINGS, cache_dir=cache_dir))


def generate(
    engine: Engine, prompts: Sequence[tuple[int, ...]], **fields: object
) -> list[list[int]]:
    """The tokens that follow each prompt, as many of them at once as there are slots."""
    requests = [
        GenerationRequest(
            request_id=str(next(_ids)),
            prompt_tokens=prompt,
            **{"max_new_tokens": 32, **fields},  # type: ignore[arg-type]
        )
        for prompt in prompts
    ]
    served = run(engine, *requests)
    return [served.tokens(request) for request in requests]


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[tuple[tuple[int, ...], list[int]]]:
    """Every prompt's tokens and its plain greedy continuation."""
    prompts = [engine.encode(prompt)[:PROMPT_TOKENS] for prompt in PROMPTS]
    return list(zip(prompts, generate(engine, prompts), strict=True))


@pytest.mark.parametrize("drafter", ["suffix", "draft"])
@pytest.mark.parametrize("k_draft", range(1, 9))
def test_speculative_greedy_output_is_plain_greedy_output(
    engine: Engine,
    plain: list[tuple[tuple[int, ...], list[int]]],
    drafter: str,
    k_draft: int,
) -> None:
    """All 200 prompts, all tokens, every number of draft tokens; `make bench` does all of each."""
    prompts, expected = zip(*plain[k_draft - 1 :: 8], strict=True)
    assert generate(engine, prompts, drafter=drafter, k_draft=k_draft) == [*expected]


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_seed_fixes_the_text_for_any_drafter_and_length(engine: Engine, adaptive: bool) -> None:
    prompts = [engine.encode(text)[:PROMPT_TOKENS] for text in PROMPTS[:4]]
    sampling = SamplingParams(0.8, top_k=50, top_p=0.95, seed=1)
    expected = generate(engine, prompts, sampling=sampling)
    for drafter in ("suffix", "draft", "cascade"):
        for k_draft in (1, 3, 8):
            fields = {"drafter": drafter, "k_draft": k_draft, "adaptive": adaptive}
            assert generate(engine, prompts, sampling=sampling, **fields) == expected


def fourth_tokens(engine: Engine, drafter: str, k_draft: int, seeds: range) -> Counts:
    """How often each token is the fourth: two to three verifications have decided by then."""
    prompt = engine.encode("import os\nimport sys\nimport re\nimport os\nimport")
    request = GenerationRequest(
        request_id="",
        prompt_tokens=prompt,
        max_new_tokens=4,
        drafter=drafter,
        k_draft=k_draft,
        sampling=SamplingParams(1.2, top_k=50, top_p=0.95),
        ignore_eos=True,
    )
    for seed in seeds:
        engine.scheduler.add(replace(request, request_id=str(seed)))
    for seed, sequence in zip(seeds, engine.scheduler.waiting, strict=True):
        sequence.rng = np.random.default_rng(seed)
    served = run(engine)
    last = [outputs[-1].pieces[-1].token for outputs in served.outputs.values()]
    return np.bincount(last, minlength=engine.info.vocab_size)


@pytest.fixture(scope="module")
def without_drafts(engine: Engine) -> Counts:
    return fourth_tokens(engine, "none", 0, range(500))


@pytest.mark.parametrize("drafter", ["suffix", "draft"])
def test_sampled_tokens_are_distributed_as_without_drafts(
    engine: Engine, without_drafts: Counts, drafter: str
) -> None:
    """Those of a request with a seed are the same tokens, as the test before this shows."""
    drafted = fourth_tokens(engine, drafter, 3, range(500, 1000))
    table = np.stack([without_drafts, drafted])
    common = table.sum(axis=0) >= 20
    rare = table[:, ~common].sum(axis=1, keepdims=True)
    table = np.concatenate([table[:, common], rare], axis=1)
    table = table[:, table.sum(axis=0) > 0]
    assert table.shape[1] > 3
    assert chi2_contingency(table).pvalue > 1e-3


def test_the_part_of_a_step_outside_of_onnx_runtime_is_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m tests.step_costs` prints it."""
    session = Stopwatch(engine.scheduler.target._session)
    monkeypatch.setattr(engine.scheduler.target, "_session", session)
    whole, outside = steps(engine, session, 2)
    assert 0 < outside < whole


@pytest.mark.reference
def test_plain_greedy_output_is_transformers_greedy_output(cache_dir: Path) -> None:
    """20 prompts of 64 tokens on the fp32 target; only a near-tie may be decided otherwise."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(THREADS)  # or its threads wait for each other while other tests compute
    engine = Engine.load(replace(SETTINGS, quant="fp32", draft="none", cache_dir=cache_dir))
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32)
    prompts = [engine.encode(text) for text in PROMPTS[:20]]
    answers = generate(engine, prompts, max_new_tokens=64)
    for prompt, ours in zip(prompts, answers, strict=True):
        with torch.inference_mode():  # what it would say after each of our tokens
            logits = model(torch.tensor([[*prompt, *ours]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits[torch.arange(len(ours)), torch.tensor(ours)]
        gap = float((logits.max(dim=-1).values - chosen).max())
        assert gap < 1e-4 * float(logits.abs().max())
