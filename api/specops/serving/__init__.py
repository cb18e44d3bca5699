"""Between HTTP and the engine: admission control, and the engine on a thread of its own.

All but the thread's own loop runs on the event loop. What a step computes is `specops.engine`'s.
"""
