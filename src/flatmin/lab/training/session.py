"""A session of a run: its progress, callback, clock, and the signals that may end it."""

import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from flatmin.lab.runs.directory import Metrics
from flatmin.lab.training.distributed import Workers
from flatmin.lab.training.steps import StepMetrics


@dataclass
class RunProgress:
    """The progress of a run: with weights and optimizer, all that a checkpoint holds."""

    COUNTS: ClassVar = ("epoch", "batch", "step", "time_seconds")

    epoch: int = 0
    batch: int = 0
    step: int = 0
    time_seconds: float = 0.0
    history: list[Metrics] = field(default_factory=list)
    sums: Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.float64))
    """Of this worker in this epoch: examples, and over them loss, error, loss at w + eps, error at w + eps."""
    rho: float = math.nan
    """SAM's radius where it was measured before the first step."""

    def to_state(self, sums: Tensor) -> dict[str, Any]:
        """Return what a checkpoint holds of it, given the sums of all workers."""
        counts = {name: getattr(self, name) for name in self.COUNTS}
        return {**counts, "history": json.dumps(self.history), "sums": sums, "rho": self.rho}

    @classmethod
    def from_state(cls, state: dict[str, Any], workers: Workers) -> "RunProgress":
        """Read what `to_state` returned, for one of the workers, which may be others than those that saved."""
        sums: Tensor = state["sums"]
        if len(sums) != workers.count:  # with another number of workers, the main process takes it all
            sums = torch.cat([sums.sum(0, keepdim=True), sums.new_zeros(workers.count - 1, sums.shape[1])])
        counts = {name: state[name] for name in cls.COUNTS}
        rho = state.get("rho", math.nan)  # checkpoints of older versions have none
        own = sums[workers.rank].to(workers.device)
        return cls(**counts, history=json.loads(state["history"]), sums=own, rho=rho)


class Callback(Protocol):
    """Is called during a run, in the main process only."""

    def on_start(self, directory: Path, num_steps: int, step: int) -> None:
        """The run starts, or resumes, at a step."""

    def on_step(self, step: int, num_examples: int, measured: StepMetrics) -> None:
        """A step was taken, on ``num_examples`` examples over all workers."""

    def on_epoch(self, metrics: Metrics, speed: Metrics) -> None:
        """An epoch was completed and evaluated."""


class Clock:
    """Measures the time of training, without evaluation and saving, and says when to save again."""

    def __init__(self, checkpoint_seconds: float) -> None:
        self.checkpoint_seconds, self.saved_at = checkpoint_seconds, time.monotonic()
        self.num_examples, self.epoch_seconds = 0, 0.0
        self.started_at: float | None = None  # None: it is stopped

    def start(self) -> None:
        """Start an epoch."""
        self.num_examples, self.epoch_seconds, self.started_at = 0, 0.0, time.monotonic()

    def stop(self) -> float:
        """Stop; return the seconds since the start, 0 if the clock was stopped already."""
        seconds = 0.0 if self.started_at is None else time.monotonic() - self.started_at
        self.started_at = None
        self.epoch_seconds += seconds
        return seconds

    def checkpoint_is_due(self) -> bool:
        """Return whether enough time has passed since the last checkpoint."""
        return time.monotonic() - self.saved_at >= self.checkpoint_seconds

    def saved(self) -> None:
        """Record that a checkpoint was written, and start again."""
        self.saved_at = self.started_at = time.monotonic()

    @property
    def examples_per_second(self) -> float:
        """The speed of this session's part of the epoch."""
        return self.num_examples / self.epoch_seconds


@dataclass
class Interruption:
    """Which signal arrived, if any."""

    signal_number: int = 0


@contextmanager
def deferred_signals() -> Iterator[Interruption]:
    """Record SIGTERM and Ctrl-C instead of dying from them; a second Ctrl-C interrupts immediately."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption  # only the main thread may handle signals
        return

    def note(number: int, _: object) -> None:
        interruption.signal_number = number
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
