"""The HTTP API: endpoints, the bodies that they take and give, errors, keys, event streams.

It turns a request of any protocol into `specops.request.GenerationRequest`s and what comes back
into that protocol's words. It knows the engine by `specops.serving` alone.
"""
