"""Sizes of the pair: one that two CPU cores train in 80 minutes, and one for an accelerator.

Hidden and feed-forward sizes are multiples of 128, the block of the int4 quantization.
"""

from dataclasses import dataclass

from transformers import LlamaConfig

from training.tokenizer import VOCAB_SIZE


@dataclass(frozen=True)
class Preset:
    """A pair and its training.

    Attributes:
        target, draft: configurations of the models.
        target_tokens, draft_tokens: numbers of training tokens.
        short, long: tokens per row and rows per step, before and after `LONG_FROM`.
    """

    target: LlamaConfig
    draft: LlamaConfig
    target_tokens: int
    draft_tokens: int
    short: tuple[int, int]
    long: tuple[int, int]


def _llama(hidden: int, feed_forward: int, layers: int, heads: int, kv_heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


PRESETS = {
    "cpu": Preset(
        target=_llama(384, 1024, 5, 6, 2),
        draft=_llama(128, 256, 2, 2, 1),
        target_tokens=18_000_000,
        draft_tokens=20_000_000,
        short=(512, 16),
        long=(1024, 8),
    ),
    "cuda": Preset(
        target=_llama(768, 2048, 8, 12, 4),
        draft=_llama(256, 768, 3, 4, 2),
        target_tokens=60_000_000,
        draft_tokens=80_000_000,
        short=(512, 32),
        long=(1024, 16),
    ),
}
