"""The memory of requests between passes: keys and values, and recurrent states."""
