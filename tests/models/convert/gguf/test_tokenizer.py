"""A GGUF's tokenizer gives the same tokens as the tokenizer.json from which it was made."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers, processors

from specops.models.convert import ExportError, export_checkpoint
from specops.models.convert.gguf.header import Metadata, read_header
from specops.models.convert.gguf.tokenizer import TokenizerFiles, tokenizer_files
from specops.models.folder import ModelFolder
from specops.text.chat_template import ChatTemplate
from specops.text.tools.formats import Tool
from tests.checkpoints import make_llama_checkpoint
from tests.models.convert.gguf.files import (
    SIZES,
    tokens_of,
    write_and_close,
    write_gguf,
    write_pieces,
    write_tokenizer,
)
from tests.text import published_tokenizers as published
from tests.text.test_tokenizer_kinds import TEXTS
from tests.text.tools import scripts

CONVERSATIONS = [
    "<|im_start|>user\nWhat's 1234 + 5678?<|im_end|>\n<|im_start|>assistant\n",
    "  <|endoftext|> <|end|>  \n\n x <s>I'LL</s>",
    "de\u0301ja\u0300 vu, \uff26\uff55\uff4c\uff11\uff12, \u00a0\u3000 spaces\t\ttabs \r\n\r\n",
]
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def llama3(size: int = 3000) -> Tokenizer:
    """Llama 3: words by an expression, whole words first, `<|begin_of_text|>` before each text."""
    text = published.smollm2(size).to_str()  # these would be end tokens in a GGUF
    for end in ("<|im_end|>", "<|endoftext|>"):
        text = text.replace(end, end.upper())
    made = json.loads(text)
    made["model"]["ignore_merges"] = True
    made["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LLAMA3_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    special = ("<|begin_of_text|>", "<|eot_id|>")
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    begin = tokenizer.token_to_id(special[0])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{special[0]} $A", special_tokens=[(special[0], begin)]
    )
    return tokenizer


def header(file: Path, architecture: str, write: Callable[[GGUFWriter], None]) -> Metadata:
    """The metadata of a file without weights."""
    writer = GGUFWriter(file, architecture)
    write(writer)
    write_and_close(writer)
    return Metadata(read_header(file).metadata, file)


def made_of(file: Path, architecture: str, write: Callable[[GGUFWriter], None]) -> TokenizerFiles:
    return tokenizer_files(header(file, architecture, write))


def same(files: TokenizerFiles, expected: Tokenizer) -> None:
    """Both give texts the same tokens, and tokens the same texts."""
    found = Tokenizer.from_str(json.dumps(files.files["tokenizer.json"]))
    assert found.get_vocab_size() >= expected.get_vocab_size()
    for text in [*TEXTS[:300], *CONVERSATIONS]:
        for special in (True, False):
            ids = expected.encode(text, add_special_tokens=special).ids
            assert found.encode(text, add_special_tokens=special).ids == ids, text
            assert found.decode(ids) == expected.decode(ids)
            assert found.decode(ids, skip_special_tokens=False) == expected.decode(
                ids, skip_special_tokens=False
            )


@pytest.mark.parametrize(
    ("pre", "make"),
    [
        ("gpt-2", lambda: published.gpt2(3000)),
        ("smollm", lambda: published.smollm2(3000)),
        ("qwen2", lambda: published.qwen2(3000)),
        ("llama-bpe", llama3),
    ],
    ids=["gpt-2", "smollm", "qwen2", "llama-bpe"],
)
def test_bytes_as_letters(pre: str, make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    expected = make()

    bos = expected.token_to_id("<|begin_of_text|>") or 0

    def write(writer: GGUFWriter) -> None:
        write_tokenizer(writer, json.loads(expected.to_str()), pre=pre, bos=bos)

    same(made_of(tmp_path / "t.gguf", "llama", write), expected)


def gemma(size: int = 3000) -> Tokenizer:
    """Gemma: no space goes before a text."""
    made = json.loads(published.llama(size).to_str())
    made["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    made["decoder"]["decoders"] = made["decoder"]["decoders"][:3]
    return Tokenizer.from_str(json.dumps(made))


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma3"])
def test_pieces(architecture: str, tmp_path: Path) -> None:
    expected = {"llama": published.llama, "phi3": published.phi3, "gemma3": gemma}[architecture](
        3000
    )

    def write(writer: GGUFWriter) -> None:
        write_pieces(writer, json.loads(expected.to_str()))
        if architecture == "phi3":
            writer.add_add_bos_token(False)
        if architecture == "gemma3":
            writer.add_add_space_prefix(False)

    # Loaded from JSON: in memory, `</s>` would stay special although it was added as not special.
    loaded = Tokenizer.from_str(expected.to_str())
    same(made_of(tmp_path / "t.gguf", architecture, write), loaded)


def test_template_end_tokens_and_special_tokens(tmp_path: Path) -> None:
    """They are in the same files as for other models."""
    source = make_llama_checkpoint(tmp_path / "source", **SIZES)
    template = "{% for m in messages %}{{ bos_token + m.content + eos_token }}{% endfor %}"

    def change(writer: GGUFWriter) -> None:
        named = {"default": template, "tool_use": scripts.TEMPLATES["hermes"]}
        writer.add_chat_template([{"name": n, "template": t} for n, t in named.items()])
        writer.add_eot_token_id(7)

    file = write_gguf(source, tmp_path / "m.gguf", lambda name: Kind.Q4_0, change=change)
    model = export_checkpoint(file, tmp_path / "onnx", quantization=None)
    assert (model.bos_token_id, model.eos_token_ids) == (0, (0, 7))
    loaded = ModelFolder.read(model.path, "m")
    assert (loaded.bos_token, loaded.end_tokens) == (0, {0, 7})
    assert loaded.quant == "gguf-Q4_0"
    chat = ChatTemplate.load(model.path)
    assert chat is not None
    rendered = chat.render([{"role": "user", "content": "Hi"}])
    assert rendered == "<|endoftext|>Hi<|endoftext|>"
    assert '"name": "f"' in chat.render([{"role": "user", "content": "Hi"}], [Tool("f")])
    found = Tokenizer.from_file(str(model.path / "tokenizer.json"))
    expected = Tokenizer.from_file(str(source / "tokenizer.json"))
    for text in TEXTS[:50]:
        assert found.encode(text).ids == expected.encode(text).ids


def changed(file: Path, *, pieces: bool = False, **keys: Any) -> TokenizerFiles:
    """The tokenizer of a file with other values of `tokenizer.ggml.…`; None takes the key away."""
    made = json.loads((published.llama if pieces else published.gpt2)(600).to_str())
    write = write_pieces if pieces else write_tokenizer
    values = dict(header(file, "llama", lambda writer: write(writer, made))._values)
    for name, value in keys.items():
        values.pop(f"tokenizer.ggml.{name}", None)
        if value is not None:
            values[f"tokenizer.ggml.{name}"] = value
    return tokenizer_files(Metadata(values, file))


def encoded(files: TokenizerFiles, text: str) -> list[int]:
    return Tokenizer.from_str(json.dumps(files.files["tokenizer.json"])).encode(text).ids


def test_absent_tokens_have_llama_cpps_defaults(tmp_path: Path) -> None:
    absent = dict.fromkeys(("bos_token_id", "eos_token_id", "unknown_token_id", "scores"))
    pieces = changed(tmp_path / "p.gguf", pieces=True, **absent)
    assert (pieces.bos, pieces.ends) == (1, [2])
    assert encoded(pieces, "a")[0] == 1
    named = pieces.files["tokenizer_config.json"]
    assert (named["bos_token"], named["eos_token"]) == ("<s>", "</s>")

    types = [1] * 600
    assert changed(tmp_path / "a.gguf", **absent, token_type=types).ends == [599]  # by its text
    types[11] = 3  # Falcon's, where token 11 is a special one
    falcon = changed(tmp_path / "b.gguf", **absent, token_type=types)
    assert (falcon.bos, falcon.ends) == (11, [11, 599])
    assert changed(tmp_path / "c.gguf", **absent, token_type=types, pre="glm4").bos is None


@pytest.mark.parametrize("token", [-1, 600, (1 << 32) - 1])
def test_a_token_out_of_range_is_as_if_absent(
    token: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    roles = ("bos", "eos", "eot", "padding", "unknown")
    files = changed(
        tmp_path / "t.gguf", pieces=True, **{f"{role}_token_id": token for role in roles}
    )
    assert (files.bos, files.ends) == (1, [2])
    assert "pad_token" not in files.files["tokenizer_config.json"]
    for role in roles:
        assert (
            f"'tokenizer.ggml.{role}_token_id' is {token}, but the vocabulary has 600"
            in caplog.text
        )


def test_a_file_may_ask_for_a_token_behind_a_text(tmp_path: Path) -> None:
    files = changed(tmp_path / "t.gguf", pieces=True, add_eos_token=True, add_bos_token=False)
    tokens = encoded(files, "a")
    assert (tokens[0] != 1, tokens[-1]) == (True, 2)


def test_tokens_that_end_an_answer_by_their_text(tmp_path: Path) -> None:
    """They need no type for it, and are never cut into pieces."""

    def ends(*texts: str, kind: int = 1) -> set[str]:
        made = json.loads(published.gpt2(600).to_str())
        tokens, _ = tokens_of(made)
        tokens[-len(texts) :] = texts
        types = [1] * (600 - len(texts)) + [kind] * len(texts)
        files = changed(
            tmp_path / "t.gguf", tokens=tokens, token_type=types, eos_token_id=None, merges=[]
        )
        text = "".join(texts)
        if kind == 1 and (found := [tokens[token] for token in encoded(files, text)]) != [*texts]:
            assert "</s>" in texts, found
        return {tokens[token] for token in files.ends}

    assert ends("<|im_end|>", "<|eot_id|>") == {"<|im_end|>", "<|eot_id|>"}
    assert ends("</s>", "[EOS]") == set()  # words like others
    assert ends("</s>", "[EOS]", kind=3) == {"</s>", "[EOS]"}
    assert ends("<|end|>", "<|return|>", "<|call|>") == {"<|return|>", "<|call|>"}
    assert ends("<|end|>", "<|calls|>") == {"<|end|>", "<|calls|>"}
    assert ends("</s>", "<|tool_response>", kind=3) == {"<|tool_response>"}


def test_tokens_without_a_text_get_one(tmp_path: Path) -> None:
    made = json.loads(published.gpt2(600).to_str())
    tokens, _ = tokens_of(made)
    tokens[400] = ""
    tokens[401] = tokens[402] = "\ufffd"
    files = changed(tmp_path / "t.gguf", tokens=tokens, merges=[])
    vocab = files.files["tokenizer.json"]["model"]["vocab"]
    assert files.size == len(vocab) == 600
    assert vocab["[EMPTY_400]"] == 400
    assert vocab["\ufffd"] == 401  # Gemma 4 has this token
    assert vocab["[EMPTY_402]\ufffd"] == 402


# -- files that lack something or have it in another form, as llama.cpp reads them ----------------

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
PIECES += ["a", "b", "c", "d", "e", "ab", "abc", "bc", "\u2581a", "de", "cde", "<", "s", ">", "<s"]
PIECES += ["/", "un", "u", "n"]
KINDS = [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) - 259)]  # types of tokens
SCORES = [*[0] * 259, *(-score for score in range(len(PIECES) - 259))]
SPECIAL = [1, 268, 259, 1, 259, 261, 2]  # of "a <s>b</s>"
LETTERS = [1, 268, 259, 1, 261, 2]  # where `<s>` is a piece like others


def retyped(kind: int, *texts: str) -> list[int]:
    return [kind if text in texts else old for text, old in zip(PIECES, KINDS, strict=True)]


@pytest.mark.parametrize(
    ("keys", "special"),
    [
        ({"scores": list(map(float, SCORES)), "token_type": KINDS}, SPECIAL),
        ({"scores": SCORES, "token_type": KINDS}, SPECIAL),
        ({"scores": [*SCORES, 0], "token_type": [*KINDS, 1]}, SPECIAL),
        ({"scores": SCORES}, LETTERS),
        ({"scores": SCORES, "token_type": retyped(1, "<s>", "</s>")}, LETTERS),
        ({"scores": SCORES, "token_type": [*KINDS[:3], *[1] * (len(PIECES) - 3)]}, SPECIAL),
        ({"scores": SCORES, "token_type": retyped(5, "ab", "de", "abc")}, SPECIAL),
        ({"scores": SCORES, "token_type": retyped(0, "ab", "de")}, SPECIAL),
        ({"scores": SCORES, "token_type": KINDS, "add_space_prefix": True}, SPECIAL),
    ],
    ids=[
        "floats",
        "integers",
        "longer",
        "no types",
        "<s>",
        "bytes",
        "unused",
        "undefined",
        "space",
    ],
)
@pytest.mark.parametrize("named", [True, False], ids=["ids", "no ids"])
def test_pieces_of_an_unusual_file(
    keys: dict[str, Any], special: list[int], tmp_path: Path, *, named: bool
) -> None:
    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(PIECES)
        for name, value in keys.items():
            add = writer.add_bool if isinstance(value, bool) else writer.add_array
            add(f"tokenizer.ggml.{name}", value)
        if named:
            writer.add_bos_token_id(1)
            writer.add_eos_token_id(2)

    files = made_of(tmp_path / "t.gguf", "llama", write)
    assert (files.bos, files.ends) == (1, [2])
    assert encoded(files, "abcde abc") == [1, 259, 266, 269, 259, 266]
    assert encoded(files, "h\u00e9 \n") == [1, 259, 107, 198, 172, 259, 13]
    assert encoded(files, "a <s>b</s>") == special


def test_a_merge_without_its_tokens_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc"]
    merges = ["a b", "z q", "q qq", "ab c", "xy", "\u0120 z"]  # the others have no result or part
    files = changed(tmp_path / "t.gguf", tokens=tokens, token_type=None, merges=merges)
    assert encoded(files, "abc zq ab") == [257, 220, 89, 80, 220, 256]
    assert "merges' has 4 merges whose parts or results are no tokens" in caplog.text


def test_tokens_of_a_gap_are_special_whatever_their_type(tmp_path: Path) -> None:
    marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *marks, "[PREFIX]"]
    files = changed(tmp_path / "t.gguf", tokens=tokens, token_type=None, merges=[])
    assert encoded(files, "a" + "".join(marks)) == [64, 256, 257, 258]
    assert len(encoded(files, "[PREFIX]")) == 8  # a word like others


def test_gemma_4_always_begins_a_text(tmp_path: Path) -> None:
    keys = {"model": "gemma4", "merges": [], "add_bos_token": False}
    assert encoded(changed(tmp_path / "t.gguf", pieces=True, **keys), "a")[0] == 1


@pytest.mark.parametrize("kind", [{"model": "gemma4"}, {"model": "llama", "pre": "gemma4"}])
def test_pieces_with_merges(kind: dict[str, str], tmp_path: Path) -> None:
    """Gemma 4's kind: SentencePiece's tokens, joined by merges instead of scores."""
    expected = gemma()
    made = json.loads(expected.to_str())

    def write(writer: GGUFWriter) -> None:
        write_pieces(writer, made)
        writer.add_token_merges([" ".join(pair) for pair in made["model"]["merges"]])

    values = dict(header(tmp_path / "t.gguf", "llama", write)._values)
    values |= {f"tokenizer.ggml.{key}": value for key, value in kind.items()}
    same(tokenizer_files(Metadata(values, tmp_path / "t.gguf")), expected)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.model", "rwkv", "is rwkv; gpt2 .* llama"),
        ("tokenizer.ggml.pre", "kimi-k9", "is kimi-k9, which is not supported; .* default"),
        ("tokenizer.ggml.tokens", ["a", "a"], "has a token twice"),
        ("tokenizer.ggml.token_type", [1, 1], "has 2 entries for 600 tokens"),
        ("tokenizer.ggml.tokens", 3, "must be a list of str"),
        ("tokenizer.ggml.merges", [1], "must be a list of str"),
        ("tokenizer.ggml.eos_token_id", "0", "must be an integer"),
        ("tokenizer.ggml.add_bos_token", 1, "must be true or false"),
    ],
)
def test_refusals(key: str, value: Any, message: str, tmp_path: Path) -> None:
    made = json.loads(published.gpt2(600).to_str())
    file = tmp_path / "t.gguf"
    header(file, "llama", lambda writer: write_tokenizer(writer, made))
    metadata = Metadata(read_header(file).metadata | {key: value}, file)
    with pytest.raises(ExportError, match=f"t.gguf: key '{key}' .*{message}"):
        tokenizer_files(metadata)
