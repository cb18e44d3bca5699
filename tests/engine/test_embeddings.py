"""Embeddings: the mean of transformers' hidden states, the same bits however they were computed,
and nothing that requests beside them would notice."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from specops.config import Settings
from specops.engine.engine import Engine
from specops.request import FinishReason, GenerationRequest, PromptTooLong
from tests.generating import run
from tests.simulated_target import SimulatedTarget, expected, make_request, make_scheduler, serve

Floats = npt.NDArray[np.float32]
TEXTS = [
    tuple(np.random.default_rng(seed).integers(0, 320, length).tolist())
    for seed, length in enumerate((1, 7, 100, 64, 33))
]


@pytest.fixture(scope="module")
def engine(tiny_settings: Settings) -> Engine:
    return Engine.load(replace(tiny_settings, draft="none"))


def request(*texts: tuple[int, ...], name: str = "e", **fields: object) -> GenerationRequest:
    """That wants the texts' embeddings."""
    return GenerationRequest(
        request_id=name,
        prompt_tokens=texts[0],
        more_prompts=texts[1:],
        max_new_tokens=0,
        embed=True,
        **fields,  # type: ignore[arg-type]
    )


def embedded(engine: Engine, *texts: tuple[int, ...]) -> Floats:
    *_, last = engine.generate(request(*texts))
    assert last.finish is FinishReason.STOP
    assert last.stats.prompt_tokens == sum(map(len, texts))
    assert last.stats.generated_tokens == 0
    return last.embeddings


@pytest.mark.reference
def test_they_are_the_mean_of_transformers_hidden_states(
    tiny_settings: Settings, tiny_pair: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    engine = Engine.load(replace(tiny_settings, draft="none", quant="fp32", kv_dtype="fp32"))
    model = transformers.LlamaModel.from_pretrained(
        tiny_pair / "target", dtype=torch.float32
    ).eval()
    found = embedded(engine, *TEXTS)
    for text, vector in zip(TEXTS, found, strict=True):
        with torch.no_grad():
            states = model(torch.tensor([text])).last_hidden_state[0].double().numpy()
        mean = states.mean(0)
        assert vector == pytest.approx(mean / np.linalg.norm(mean), abs=1e-6)


def test_they_have_length_1_and_one_is_there_for_each_text(engine: Engine) -> None:
    found = embedded(engine, *TEXTS)
    assert found.shape == (len(TEXTS), engine.info.embedding_size)
    assert np.linalg.norm(found, axis=1) == pytest.approx(1, abs=1e-6)


def test_the_bits_are_the_same_alone_together_and_beside_others(engine: Engine) -> None:
    together = embedded(engine, *TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        assert (embedded(engine, text)[0] == vector).all()
    talks = [
        GenerationRequest(
            request_id=str(number), prompt_tokens=TEXTS[2][number:], max_new_tokens=20,
            ignore_eos=True,
        )
        for number in range(2)
    ]  # fmt: skip
    alone = [[p.token for o in engine.generate(talk) for p in o.pieces] for talk in talks]
    served = run(engine, request(*TEXTS), *talks)
    assert (served.outputs["e"][-1].embeddings == together).all()
    assert [served.tokens(talk) for talk in talks] == alone


def test_a_text_beyond_the_context_is_refused(engine: Engine) -> None:
    whole = request((1,), (1,) * engine.info.context)  # no token of an answer follows
    assert engine.admit(whole).prompts == whole.prompts
    with pytest.raises(PromptTooLong):
        engine.admit(request((1,), (1,) * (engine.info.context + 1)))


# -- beside others, on a simulated target --------------------------------------------------------


def simulated(text: tuple[int, ...]) -> Floats:
    target = SimulatedTarget(num_slots=1)
    (outputs,) = serve(make_scheduler(target), request(text)).outputs.values()
    return outputs[-1].embeddings[0]


def longer(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(1, 64, length).tolist())


def test_they_need_no_logits_and_as_few_passes_as_a_prompt() -> None:
    """Of Qwen3 0.6B the product with the vocabulary is a quarter of the arithmetic."""
    alone, beside = SimulatedTarget(num_slots=4), SimulatedTarget(num_slots=4)
    (text,) = serve(make_scheduler(alone), request(longer(1, 500))).outputs.values()
    assert [batch.num_logits for batch in alone.passes] == [0] * len(alone.passes)
    prompt = SimulatedTarget(num_slots=4)
    serve(make_scheduler(prompt), make_request(longer(1, 500), 1))
    assert len(alone.passes) == len(prompt.passes)
    talk = make_request(90, 4)
    served = serve(make_scheduler(beside), request(longer(1, 500)), talk)
    assert max(batch.num_logits for batch in beside.passes) == 1  # the talk's
    assert served.tokens(talk) == expected(beside.text, talk)
    assert (served.outputs["e"][-1].embeddings == text[-1].embeddings).all()


def test_a_few_chats_do_not_starve_them() -> None:
    """Chats of long prompts and short answers, which follow each other without an end."""
    target = SimulatedTarget(num_slots=5)
    scheduler = make_scheduler(target)
    scheduler.add(request(longer(9, 500)))
    chats = (make_request(longer(seed, 600), 20) for seed in range(10, 400))
    ended: list[str] = []
    while "e" not in ended and len(ended) < 40:
        while len(scheduler._in_flight) < 4 + ("e" in scheduler._in_flight):
            scheduler.add(replace(next(chats), arrival=target.clock.now))
        ended += [item.request_id for item in scheduler.step().outputs if item.finish]
    assert "e" in ended


def test_a_prompt_that_comes_later_goes_first() -> None:
    """A request with many texts to embed would keep it waiting for minutes."""
    target = SimulatedTarget(num_slots=4)
    scheduler = make_scheduler(target)
    scheduler.add(request(*(longer(seed, 300) for seed in range(40))))
    for _ in range(3):
        scheduler.step()
    late = make_request(90, 1)
    scheduler.add(late)
    outputs = [output for _ in range(2) for output in scheduler.step().outputs]
    assert [output.request_id for output in outputs] == [late.request_id]


def test_preempted_and_computed_again_they_stay_the_same() -> None:
    texts = [longer(seed, 150) for seed in range(70)]
    target = SimulatedTarget(num_slots=3, context=256, num_blocks=7)
    first, second = make_request(60, 150), make_request(60, 150)
    asked = request(*texts)
    served = serve(make_scheduler(target), first, second, asked)
    assert served.stats(asked).preemptions > 0
    found = served.outputs["e"][-1].embeddings
    assert found is not None
    for text, vector in zip(texts, found, strict=True):
        assert (vector == simulated(text)).all()
    for talk in (first, second):
        assert served.tokens(talk) == expected(target.text, talk)


def test_they_take_nothing_from_the_prefix_cache_and_leave_nothing_in_it() -> None:
    target = SimulatedTarget(num_slots=2)
    scheduler = make_scheduler(target)
    talk = make_request(longer(3, 200), 8)
    serve(scheduler, talk)
    kept = target.cache.cached_blocks
    asked = request(talk.prompt_tokens, longer(4, 500))
    served = serve(scheduler, asked)
    assert served.stats(asked).cached_prompt_tokens == 0
    assert target.cache.cached_blocks == kept
    assert (served.outputs["e"][-1].embeddings[0] == simulated(talk.prompt_tokens)).all()
