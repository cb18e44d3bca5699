"""Makes the small model that stands for llama.cpp's test model, which only the hub has.

Its suite runs on stories260K, a Llama of five layers with 512 tokens, and compares numbers of
tokens. This one has the same shape, and a tokenizer whose merges, found by a search, give the
suite's prompts the same numbers. Its weights are random, and it never writes a special token or a
single byte. A second one has the tokens that mark a gap in a text.
"""

import json
from pathlib import Path

from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from tests.checkpoints import make_llama_checkpoint

MERGES = (Path(__file__).parent / "merges.txt").read_text(encoding="utf-8").split()
SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
CHARACTERS = ("▁", *(chr(c) for c in range(33, 127) if chr(c) not in "_^{}\\~`@#=$%&[]"))
PIECES = (*SPECIAL, *BYTES, *MERGES, *CHARACTERS)
GAP = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def make(folder: Path) -> None:
    """Make both models below `folder`, unless they are there."""
    for name, more in (("stories", ()), ("stories-infill", GAP)):
        if not (folder / name / "tokenizer_config.json").exists():
            _make(folder / name, more)


def _make(folder: Path, more: tuple[str, ...]) -> None:
    sizes = {"hidden": 64, "layers": 5, "heads": 8, "kv_heads": 4, "ffn": 172, "context": 512}
    vocabulary, own = len(PIECES) + len(more), {"bos_token_id": 1, "eos_token_id": 2}
    make_llama_checkpoint(folder, **sizes, vocab=vocabulary, config=own)
    tensors = load_file(folder / "model.safetensors")
    # A channel that no layer changes is the same for every token: it keeps some from being chosen.
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    embedding[:, 0], head[:, 0] = 4 * embedding.std(), 0
    head[[*range(len(SPECIAL + BYTES)), *range(len(PIECES), vocabulary)], 0] = -100 * head.std()
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _tokenizer(more).save(str(folder / "tokenizer.json"))
    words = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, **words}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _tokenizer(more: tuple[str, ...]) -> Tokenizer:
    vocabulary = {piece: number for number, piece in enumerate(PIECES)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in MERGES
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    made = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.add_special_tokens([AddedToken(token, special=True) for token in (*SPECIAL, *more)])
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made
