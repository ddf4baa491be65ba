"""A session of a run: its progress, callback, clock, algorithms, and what may end it: a signal, a diverging loss."""

import math
import os
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

from flatmin.lab.runs.history import Metrics
from flatmin.lab.spec.experiment import Optim
from flatmin.lab.training.distributed import Workers
from flatmin.lab.training.steps import StepMetrics


@dataclass
class RunProgress:
    """The progress of a run: with weights, optimizer and metrics.jsonl, all that it needs to resume."""

    COUNTS: ClassVar = ("epoch", "batch", "step", "time_seconds", "rho")

    epoch: int = 0
    batch: int = 0
    step: int = 0
    time_seconds: float = 0.0
    history: list[Metrics] = field(default_factory=list)
    """One line for each completed epoch."""
    sums: Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.float64))
    """Of this worker in this epoch: examples, and over them loss, error, loss at w + eps, error at w + eps."""
    rho: float = math.nan
    """SAM's radius where it was measured before the first step."""

    def to_state(self, sums: Tensor) -> dict[str, Any]:
        """Return what a checkpoint holds of it, given the sums of all workers."""
        return {name: getattr(self, name) for name in self.COUNTS} | {"sums": sums}

    @classmethod
    def from_state(cls, state: dict[str, Any], history: list[Metrics], workers: Workers) -> "RunProgress":
        """Read what `to_state` returned, for one of the workers; their number may have changed since."""
        sums: Tensor = state["sums"]
        if len(sums) != workers.count:  # the main process takes it all
            sums = torch.cat([sums.sum(0, keepdim=True), sums.new_zeros(workers.count - 1, sums.shape[1])])
        counts = {name: state[name] for name in cls.COUNTS}
        return cls(**counts, history=history, sums=sums[workers.rank].to(workers.device))


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


@dataclass
class Interruption:
    """Which signal arrived, if any."""

    signal_number: int = 0


@contextmanager
def deferred_signals() -> Iterator[Interruption]:
    """Record SIGTERM and Ctrl-C; a second Ctrl-C has the effect it had before."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption  # only the main thread may handle signals
        return

    def note(number: int, _: object) -> None:
        interruption.signal_number = number
        signal.signal(signal.SIGINT, before[signal.SIGINT])

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Let CUDA compute in the same order every time, if asked to; an operation that cannot raises an error.

    cuBLAS reads its variable when CUDA starts: call it before.
    """
    if not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.backends.cudnn.benchmark = benchmark


def fixes(optim: Optim, precision: str) -> list[str]:
    """Return what may help if the loss diverges (NaN or inf), in a precision that is not "auto".

    Example:
        >>> fixes(Optim(lr=3.0, clip_norm=5.0), "float32")
        ['a smaller optim.lr than 3', 'optim.warmup_epochs']
    """
    advice = [f"a smaller optim.lr than {optim.lr:g}", "optim.warmup_epochs"]
    advice += [f"a smaller optim.rho than {optim.rho_text}"] if optim.uses_sam else []
    advice += ["optim.clip_norm (the reference code has 5.0)"] if optim.clip_norm is None else []
    advice += ["precision float32"] if precision == "bfloat16" else []
    return advice
