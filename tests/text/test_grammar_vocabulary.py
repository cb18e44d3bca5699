"""The grammar library gets the tokens that it would read itself, in the memory that is planned."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from specops.text.grammar_vocabulary import (
    GrammarVocabulary,
    UnsupportedTokenizer,
    vocabulary_bytes,
)
from specops.text.tokenizer import Tokenizer
from tests.text import published_tokenizers as published
from tests.waiting import printed

TEXTS = (
    "hello", " hello world", '{"name": "Ada", "n": [1, 2]}', "  two", "Größe 日本 🙂🏽", "<think>",
    "<|im_end|>\n<tool_call>", "▁a", "<0x41>", "", "\n\n\t", "isn't it?",
)  # fmt: skip
SMALL: list[tuple[Callable[[int], FastTokenizer], int]] = [
    (published.llama, 600), (published.llama_not_legacy, 600), (published.phi3, 600),
    (published.gemma3, 600), (published.gpt2, 600), (published.smollm2, 600),
    (published.starcoder2, 600), (published.qwen2, 600), (published.opt, 600),
]  # fmt: skip


@pytest.mark.parametrize(("make", "size"), SMALL)
def test_the_library_gets_the_tokens_that_it_would_read(
    make: Callable[[int], FastTokenizer], size: int
) -> None:
    fast = FastTokenizer.from_str(make(size).to_str())
    fast.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "  ")])
    fast.add_special_tokens(["<|im_end|>"])
    size = fast.get_vocab_size() + 3  # a model may have more logits than tokens
    own = GrammarVocabulary(Tokenizer(fast), size, frozenset({2, 0})).get()
    read = LLTokenizer(fast.to_str(), n_vocab=size, eos_token=[0, 2])
    assert (own.vocab_size, own.eos_tokens) == (read.vocab_size, read.eos_tokens)
    for token in range(fast.get_vocab_size()):
        assert own.decode_bytes([token]) == read.decode_bytes([token]), fast.id_to_token(token)
        assert own.is_special_token(token) == read.is_special_token(token)
    for text in TEXTS:
        assert own.tokenize_str(text) == read.tokenize_str(text), text
        assert own.greedy_tokenize(text) == read.greedy_tokenize(text), text


# Prints the bytes held by a vocabulary of the folder's tokenizer, and those at the peak.
MEASURE = """
import sys
from pathlib import Path
from specops.system.allocator import give_back, configure_malloc
from specops.system.memory import process_memory
from specops.text.grammar_vocabulary import GrammarVocabulary
from specops.text.tokenizer import Tokenizer

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

configure_malloc()
tokenizer = Tokenizer.load(Path(sys.argv[1]))
give_back()
Path("/proc/self/clear_refs").write_text("5")
resident, held = status("VmRSS"), process_memory().anon
vocabulary = GrammarVocabulary(tokenizer, int(sys.argv[2]), frozenset({0}))
vocabulary.get()
give_back()
print(process_memory().anon - held, status("VmHWM") - resident)
"""
SIZES = {
    32_000: published.llama, 49_152: published.smollm2, 50_257: published.gpt2,
    151_936: published.qwen2, 262_144: published.gemma3,
}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="reads procfs")
@pytest.mark.parametrize("size", SIZES)
def test_a_vocabulary_takes_what_is_planned(size: int, tmp_path: Path) -> None:
    """Made-up words share more beginnings than real ones, which take 0.87 to 0.98 of the plan."""
    SIZES[size](size - 3 * (size == 151_936)).save(str(tmp_path / "tokenizer.json"))
    held, peak = map(int, printed(MEASURE, tmp_path, size).split())
    assert 0.6 < held / vocabulary_bytes(size) < 1
    assert peak < 1.4 * vocabulary_bytes(size)


def test_it_is_made_once_for_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    made, may = list[int](), threading.Event()

    def slow(*arguments: object, **options: object) -> LLTokenizer:
        made.append(1)
        assert may.wait(60)
        return LLTokenizer("byte")

    monkeypatch.setattr("specops.text.grammar_source.LLTokenizer", slow)
    vocabulary = GrammarVocabulary(Tokenizer(published.gpt2(600)), 600, frozenset({0}))
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(vocabulary.get) for _ in range(3)]
        may.set()
    assert len({id(one.result()) for one in waiting}) == len(made) == 1


def test_what_the_library_does_not_take_is_said_to_everyone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Panic(BaseException):
        """As `pyo3_runtime.PanicException`."""

    def fails(*arguments: object, **options: object) -> LLTokenizer:
        raise Panic("too long")

    monkeypatch.setattr("specops.text.grammar_source.LLTokenizer", fails)
    vocabulary = GrammarVocabulary(Tokenizer(published.gpt2(600)), 600, frozenset({0}))
    for _ in range(2):
        with pytest.raises(UnsupportedTokenizer, match="does not support grammars: too long"):
            vocabulary.get()
    assert vocabulary.refused == "this model's tokenizer does not support grammars: too long"


def test_a_model_without_an_end_has_no_grammars() -> None:
    vocabulary = GrammarVocabulary(Tokenizer(published.gpt2(600)), 600, frozenset())
    with pytest.raises(UnsupportedTokenizer, match="no token ends a text"):
        vocabulary.get()


def test_a_refused_vocabulary_is_never_made() -> None:
    vocabulary = GrammarVocabulary(Tokenizer(published.gpt2(600)), 600, frozenset({0}))
    vocabulary.refused = "no room"
    with pytest.raises(UnsupportedTokenizer, match="no room"):
        vocabulary.get()
