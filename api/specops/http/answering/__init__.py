"""From a checked request body to its answers: the part that all endpoints share.

`submit` turns a body into requests of the engine, `job` follows them, and `writer` sends what comes
back. `conversation` and `speech` add what chats need.
"""
