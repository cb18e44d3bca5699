"""The HTTP API: endpoints, bodies, errors, keys, event streams.

A request of any protocol becomes `specops.request.GenerationRequest`s, and their outputs become an
answer in that protocol. The package reaches the engine only through `specops.serving`.
"""
