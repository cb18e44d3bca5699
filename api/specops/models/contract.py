"""What the converter writes and the engine reads: words that both have to spell alike."""

MANIFEST = "specops.json"  # the file that describes an export
MICROSOFT = "com.microsoft"  # the domain of ONNX Runtime's own operators
INT8_ACTIVATIONS = 4  # MatMulNBits' accuracy_level: inputs are quantized to int8, block by block
