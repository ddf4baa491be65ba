"""``flatmin train``."""

import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from flatmin.lab.commands.console import BarCallback, JsonCallback, write_event
from flatmin.lab.runs.directory import Result
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.training.engine import CHECKPOINT_SECONDS, train

Output = Literal["bar", "quiet", "json"]


@dataclass(frozen=True)
class Train:
    """Train a model; rerun the command to resume it, or to get its result."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")] = field(default_factory=Experiment)
    seed: int = 0
    """Initial weights, order, augmentation, random layers; at least 0."""
    runs: Path = Path("runs")
    """The directory of all runs."""
    data_root: Path | None = None
    """The first directory in which datasets are searched for (then FLATMIN_DATA, ./data, the user's cache)."""
    output: Output = "bar"
    """bar: progress bar; quiet: only the result; json: one JSON object per line."""
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    """Save after this many seconds of training."""
    deterministic: bool = False
    """On CUDA, use only deterministic algorithms: slower, and bitwise the same when repeated or resumed."""

    def run(self, console: Console) -> None:
        """Train."""
        is_main = os.environ.get("RANK", "0") == "0"
        bar = BarCallback(console) if self.output == "bar" and is_main else nullcontext()
        with bar as callback:
            result = train(
                self.experiment,
                seed=self.seed,
                runs=self.runs,
                data_root=self.data_root,
                callback=JsonCallback() if self.output == "json" else callback,
                checkpoint_seconds=self.checkpoint_seconds,
                deterministic=self.deterministic,
            )
        if not is_main:
            return
        if self.output == "json":
            write_event("result", {"directory": str(result.directory), **result.metrics})
        else:
            console.print(_summary(result))


def _summary(result: Result) -> str:
    errors = [f"{name} error {100 * (result.metrics.get(f'{name}_error') or 0.0):.2f} %" for name in ("valid", "test")]
    errors = errors if "valid_error" in result.metrics else errors[1:]
    num = len(result.history)
    epochs = f"{num} epoch{'s' if num > 1 else ''}"
    return f"{result.directory}: {', '.join(errors)} after {epochs}, {result.time_seconds:.0f} s"
