"""The server's process: connections, restart, and what asks from outside whether it is well.

The healthcheck and the watchdog are programs of a few megabytes, so this package imports nothing.
"""
