"""Between HTTP and the engine: admission control, and the engine's thread.

Everything except the thread's own loop runs on the event loop. `specops.engine` computes the steps.
"""
