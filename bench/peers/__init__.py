"""Compares with other engines that a user could run: llama.cpp and OpenVINO.

Each side is a separate process, a `*_worker`, and follows `protocol`. The peers' libraries are in a
separate environment (`environment`). Their model files come from the same random checkpoint as ours
(`models`). `compare` times single passes; `bench.serving.at_once` times whole concurrent requests.
"""
