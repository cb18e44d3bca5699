"""Other engines that a user could run, measured side by side: llama.cpp and OpenVINO.

Each side is a process of its own, a `*_worker`, and answers as `protocol` says. The peers'
libraries are in an environment of their own (`environment`). Their model files come from the same
random checkpoint as ours (`models`). `compare` times single passes; `bench.serving.at_once` times
whole requests that arrive at once.
"""
