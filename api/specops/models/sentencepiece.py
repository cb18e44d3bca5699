"""Makes a tokenizer.json from SentencePiece's tokenizer.model, which older Llamas come with.

A tokenizer.model is a protocol buffer with every piece and its score; transformers has its
description. It is a byte-pair encoding without merges. The merges are the pairs of pieces that make
another piece, best score first. The result is configured like the published tokenizer.json of Llama
2: a mark before the text and for every space, and bytes for characters outside the vocabulary.
"""

import json
from collections.abc import Iterable, Sequence
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from specops.text.files import SENTENCEPIECE, TOKENIZER_CONFIG

MARK = "\u2581"  # the sign for a space
_BPE = 2  # trainer_spec.model_type
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # kinds of pieces; 1: ordinary, 6: a byte

Piece = tuple[str, float, int]
"""A piece's text, score and kind."""


class SentencePieceError(Exception):
    """A tokenizer.model cannot be read; the message says why."""


def make_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer that a folder's tokenizer.model and tokenizer_config.json describe.

    Raises:
        SentencePieceError: tokenizer.model is damaged or is not a byte-pair encoding.
        OSError: a file cannot be read.
    """
    file = folder / SENTENCEPIECE
    content = file.read_bytes()
    messages: Any = import_module("transformers.utils.sentencepiece_model_pb2_new")  # heavy
    try:
        model = messages.ModelProto.FromString(content)
        if not model.pieces:
            raise ValueError("it has no pieces")
        if model.trainer_spec.model_type != _BPE:
            raise SentencePieceError(
                f"{file} is not a byte-pair encoding, the only kind that can be read"
            )
        return _tokenizer(folder, model)
    except SentencePieceError:
        raise
    except Exception as error:  # the Rust library raises bare Exception
        raise SentencePieceError(f"{file} is damaged ({error}): download it again") from error


def _tokenizer(folder: Path, model: Any) -> Tokenizer:
    trainer = model.trainer_spec
    pieces = [(piece.piece, piece.score, piece.type) for piece in model.pieces]
    made = bpe_tokenizer(pieces, unknown=trainer.unk_id, byte_fallback=trainer.byte_fallback)
    tokenizer = Tokenizer.from_str(json.dumps(made))
    file = folder / TOKENIZER_CONFIG
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    bos = trainer.bos_id
    if settings.get("add_bos_token", True) and 0 <= bos < len(pieces):
        begin = pieces[bos][0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, bos)]
        )
    return tokenizer


def bpe_tokenizer(
    pieces: Sequence[Piece], *, unknown: int, byte_fallback: bool, space_first: bool = True
) -> dict[str, Any]:
    """Return what `described` does, for SentencePiece's pieces; no token begins a text.

    Args:
        pieces: the pieces in the order of their ids.
        unknown: the id of the piece for unknown characters.
        byte_fallback: whether pieces for bytes spell unknown characters instead.
        space_first: whether a space is put before a text.
    """
    tokenizer = Tokenizer(models.BPE())
    if space_first:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)]
        )
    else:
        tokenizer.normalizer = normalizers.Replace(" ", MARK)
    tokenizer.decoder = pieces_decoder(space_first=space_first)
    match_first(tokenizer, ((text, kind) for text, _, kind in pieces))
    vocab = {text: index for index, (text, _, _) in enumerate(pieces)}
    options = {"unk_token": pieces[unknown][0], "fuse_unk": True, "byte_fallback": byte_fallback}
    return described(tokenizer, vocab, _merges(pieces, vocab), **options)


def described(
    tokenizer: Tokenizer, vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> dict[str, Any]:
    """Return the content of a tokenizer.json: this tokenizer with this vocabulary and these merges.

    The library would take a second to build a model of 262,144 tokens, and most are read once.

    Args:
        tokenizer: without a vocabulary.
        vocab: numbers of the pieces.
        merges: in their order.
        options: further fields of the model.
    """
    made: dict[str, Any] = json.loads(tokenizer.to_str())
    for token in made["added_tokens"]:
        token["id"] = vocab[token["content"]]
    made["added_tokens"].sort(key=itemgetter("id"))
    made["model"] |= {**options, "vocab": vocab, "merges": merges}
    return made


def pieces_decoder(*, space_first: bool = False) -> decoders.Decoder:
    """Return a decoder of pieces; with `space_first` a text loses the space that was put first."""
    spelled = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*spelled, *([decoders.Strip(" ", 1, 0)] if space_first else [])])


def match_first(tokenizer: Tokenizer, tokens: Iterable[tuple[str, int]]) -> None:
    """Match special and user-defined tokens in a text before it is normalized and split."""
    special, plain = [], []
    for text, kind in tokens:
        if kind in (UNKNOWN, CONTROL):
            special.append(AddedToken(text, normalized=False))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(text, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _merges(pieces: Sequence[Piece], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Return the pairs that make a piece, in the order of merging."""
    merges, get = list[tuple[float, str, int]](), vocab.get
    for text, score, kind in pieces:
        if kind not in (UNKNOWN, CONTROL, UNUSED):
            pairs = []
            for at in range(1, len(text)):
                one = get(text[:at])
                if one is not None and (other := get(text[at:])) is not None:
                    pairs.append((one, other, at))
            if len(pairs) > 1:
                pairs.sort()
            merges += [(-score, text, at) for _, _, at in pairs]
    merges.sort(key=itemgetter(0))  # stable: with equal scores the earlier piece goes first
    return [(text[:at], text[at:]) for _, text, at in merges]
