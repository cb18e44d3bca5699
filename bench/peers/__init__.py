"""What a user could run instead, measured side by side: llama.cpp and OpenVINO.

Each side is a process of its own that speaks `protocol`: `worker` is our end of it, `*_worker` are
theirs. The peers' libraries live in an environment of their own (`environment`), their model files
come from the same random checkpoint as ours (`models`). `compare` times single passes, `serving`
whole requests that arrive at once.
"""
