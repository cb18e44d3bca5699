"""What the converter writes and the engine reads: words that both have to spell alike."""

MANIFEST = "specops.json"  # the file that describes an export
MICROSOFT = "com.microsoft"  # the domain of ONNX Runtime's own operators
GGUF_MATMUL, GGUF_GATHER = "GgufMatMul", "GgufGather"  # see `specops.models.convert.graph`
INT8_ACTIVATIONS = 4  # MatMulNBits' accuracy_level: inputs are quantized to int8, block by block
SOURCE = "source-"  # begins the location of a weight that stays in its source file
USED = "used"  # a file beside a prepacked graph: how many bytes of its weights a pass reads
WARNING = "warning: "  # begins a line that the converter prints for people
STATES, NEXT_STATES, FUSED = "states", "next_states", "fused"  # tensors of a draft head's graphs
MAX_GUESSABLE = 1 << 16
"""Most tokens that a draft head with the whole vocabulary guesses: the first ones.

Tokenizers of byte pairs number tokens in the order of merges, the frequent ones first: these are
98.3 % of English text and of Python under Qwen's vocabulary (ids below 32,000: 93 %), and take a
quarter of the time of all 248,320. A multiple of a tile's 16 rows.
"""
FORMAT_VERSION = 10
"""Goes up by hand whenever a conversion of the same checkpoint gets another content.

Then every checkpoint is converted anew at the next start. `tests/models/convert/test_format.py`
compares conversions with digests of earlier ones and fails where this was forgotten.
"""
