"""What a user could run instead, measured side by side: llama.cpp and OpenVINO.

Each side is a process of its own that speaks `protocol`; `*_worker` are the sides. The peers'
libraries live in an environment of their own (`environment`), their model files come from the same
random checkpoint as ours (`models`). `compare` times single passes; `bench.serving.at_once` times
whole requests that arrive at once.
"""
