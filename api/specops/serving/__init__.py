"""Between HTTP and the engine: admission control, and the engine on a thread of its own.

Everything except the thread's own loop runs on the event loop. `specops.engine` computes the steps.
"""
