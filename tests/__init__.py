"""Tests mirror the packages; a package itself, so that its helpers are imported by name."""

import os

# Each worker of pytest has a core. Threads of torch or NumPy beside it would spin for each other.
for _library in ("OMP", "OPENBLAS"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")
