"""The command ``flatmin``: demo, train, reproduce, report, list, show, measure.

Exit codes: 0 done; 1 a fault of flatmin; 2 a wrong command, setting, network or run; 3 data missing or damaged; 4
nothing can be written; 5 the loss diverged; 128 + n stopped by signal n (130 Ctrl-C, 143 SIGTERM), everything saved.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

try:
    import tyro
    from rich.console import Console
except ImportError as missing:  # pragma: no cover (the tests have them)
    sys.exit(f"flatmin's command line needs the extra `lab` ({missing.name} is missing): pip install 'flatmin[lab]'")

from flatmin.lab.checkpoint import StorageError
from flatmin.lab.data.images import DataError
from flatmin.lab.demo import Demo
from flatmin.lab.divergence import DivergedError
from flatmin.lab.engine import CHECKPOINT_SECONDS, train
from flatmin.lab.measure_commands import Measure
from flatmin.lab.models.weights import ModelError
from flatmin.lab.progress import BarListener, JsonListener, write_event
from flatmin.lab.reproduce import Report, Reproduce
from flatmin.lab.run_directory import Result, RunError
from flatmin.lab.session import InterruptedRun
from flatmin.lab.show_commands import List, Show
from flatmin.lab.spec import Experiment, SpecError

DESCRIPTION = "Sharpness-Aware Minimization: train networks to flat minima, and measure how flat they are."

Output = Literal["bar", "quiet", "json"]

EXIT_CODES: tuple[tuple[type[Exception], int], ...] = (
    (SpecError, 2),
    (ModelError, 2),
    (RunError, 2),
    (DataError, 3),
    (StorageError, 4),
    (DivergedError, 5),
)


@dataclass(frozen=True)
class Train:
    """Train a network; the same command again returns the finished result, or goes on where it stopped."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")] = field(default_factory=Experiment)
    seed: int = 0
    """Initial weights, order, augmentation, random layers; at least 0."""
    runs: Path = Path("runs")
    """The folder of all runs."""
    data_root: Path | None = None
    """The first folder in which datasets are looked for (then FLATMIN_DATA, ./data, the user's cache)."""
    output: Output = "bar"
    """bar: progress for people; quiet: only the result; json: one JSON object a line, for scripts."""
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    """Save after so many seconds of training."""

    def run(self, console: Console) -> None:
        """Train."""
        keywords: dict[str, Any] = {
            "seed": self.seed,
            "runs": self.runs,
            "data_root": self.data_root,
            "checkpoint_seconds": self.checkpoint_seconds,
        }
        leads = os.environ.get("RANK", "0") == "0"
        if self.output == "bar" and leads:
            with BarListener(console) as listener:
                result = train(self.experiment, listener=listener, **keywords)
        else:
            result = train(self.experiment, listener=JsonListener() if self.output == "json" else None, **keywords)
        if not leads:
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


COMMANDS: dict[str, Any] = {
    "demo": Demo,
    "train": Train,
    "reproduce": Reproduce,
    "report": Report,
    "list": List,
    "show": Show,
    "measure": Measure,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    console = Console(soft_wrap=not sys.stdout.isatty())
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    warnings.showwarning = lambda message, *_: errors.print(f"[yellow]warning:[/yellow] {message}")
    try:
        markers = (tyro.conf.OmitArgPrefixes,) if arguments[:1] == ["measure"] else ()
        command = tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="flatmin", description=DESCRIPTION, args=arguments, config=markers
        )
        command.run(console)
    except InterruptedRun as stopped:
        errors.print(f"[yellow]stopped:[/yellow] {stopped}")
        return 128 + stopped.signal_number
    except tuple(kind for kind, _ in EXIT_CODES) as mistake:
        errors.print(f"[red]error:[/red] {mistake}")
        return next(code for kind, code in EXIT_CODES if isinstance(mistake, kind))
    return 0


if __name__ == "__main__":
    sys.exit(main())
