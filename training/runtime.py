"""Shared parts of the training loops: the budget, the stop signal, the machine."""

import platform
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass
class Budget:
    """The length of a training: a number of tokens (repeatable) or minutes of training time.

    Attributes:
        tokens: number of tokens.
        minutes: training time instead; None: the number of tokens counts.
        tokens_done, seconds_done: the amount spent.
    """

    tokens: int
    minutes: float | None = None
    tokens_done: int = 0
    seconds_done: float = 0.0
    _last: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        """Start counting time, which excludes loading and compiling before."""
        self._last = time.monotonic()

    def spend(self, tokens: int) -> None:
        """Record a step with this many tokens."""
        now = time.monotonic()
        self.seconds_done += now - self._last
        self.tokens_done += tokens
        self._last = now

    @property
    def progress(self) -> float:
        """The spent share of the budget, 0 to 1."""
        if self.minutes is not None:
            return min(1.0, self.seconds_done / (60 * self.minutes))
        return min(1.0, self.tokens_done / self.tokens)

    def eta_minutes(self) -> float:
        """Minutes left at the current average speed."""
        if self.progress == 0:
            return float("inf")
        return self.seconds_done / 60 * (1 / self.progress - 1)


def device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def stop_signal() -> threading.Event:
    """An event set by SIGINT and SIGTERM, so that a loop can save before it ends."""
    event = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: event.set())
    return event


def machine(threads: int) -> dict[str, object]:
    """A description of the machine, for the model card."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if not torch.cuda.is_available() and cpuinfo.exists():
        lines = cpuinfo.read_text("utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else name
    return {
        "processor": name,
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
