"""Measures this project on this machine: `python -m bench NAME` (`benchmarks` lists the names).

Packages follow those of the service: `speculation`, `runtime`, `engine`, `serving`, `memory`.
`peers` compares with other engines. All benchmarks share `tools`, `models` and `prompts`.
"""
