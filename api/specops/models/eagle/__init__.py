"""Reads the checkpoints of EAGLE-3 heads and converts them into graphs that run with a target's."""
