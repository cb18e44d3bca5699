"""Spec-Ops: an LLM inference service for small machines, fast by lossless speculative decoding."""
