"""A token that the tokenizer has and the model has not ends its request, and nothing else."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer

from specops.config import Settings
from specops.engine.engine import Engine, UnknownToken
from specops.request import GenerationRequest

VOCAB = 320


@pytest.fixture(params=["fp32", "int8-128"])
def engine(
    request: pytest.FixtureRequest, tiny_settings: Settings, tiny_pair: Path, tmp_path: Path
) -> Engine:
    """A model whose tokenizer got a token of its own, as fine-tuning may add it."""
    folder = shutil.copytree(tiny_pair / "target" / "onnx" / request.param, tmp_path / "target")
    tokenizer = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    number = 0
    while tokenizer.get_vocab_size() <= VOCAB:
        number += tokenizer.add_tokens([f"<added {number}>"])
    assert tokenizer.token_to_id(f"<added {number - 1}>") == VOCAB
    tokenizer.save(str(folder / "tokenizer.json"))
    return Engine.load(replace(tiny_settings, target=str(folder), draft="none"))


def test_it_is_refused_before_a_pass(engine: Engine) -> None:
    (added,) = (token for token, number in engine.tokenizer.vocabulary().items() if number == VOCAB)
    prompt = engine.encode(f"def {added}(")
    assert VOCAB in prompt
    request = GenerationRequest(request_id="x", prompt_tokens=prompt, max_new_tokens=3)
    with pytest.raises(UnknownToken, match="token 320, but the model has 320 tokens"):
        list(engine.generate(request))
    texts = replace(request, prompt_tokens=(1,), more_prompts=(prompt,), embed=True)
    with pytest.raises(UnknownToken):
        engine.admit(texts)
    assert not engine.scheduler.busy
    assert engine.admit(replace(request, prompt_tokens=(VOCAB - 1,))).max_new_tokens == 3
