"""Measures this project on this machine: `python -m bench NAME` (`benchmarks` has the names).

Packages follow the rooms of the service: `speculation`, `runtime`, `engine`, `serving`, `memory`.
`peers` compares with other engines. `tools`, `models` and `prompts` belong to all of them.
"""
