"""Reads the checkpoints of EAGLE-3 heads and converts them into graphs beside their target's."""
