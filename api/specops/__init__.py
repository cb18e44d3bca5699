"""Spec-Ops: an LLM inference service for small machines, fast by lossless speculative decoding."""

import os

# Before anything imports ONNX Runtime, which would note each session in a file below the home
# folder and send it to its maker.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
