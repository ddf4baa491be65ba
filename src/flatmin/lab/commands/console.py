"""What commands print: runs, tables, numbers, a bar that follows training, JSON lines for scripts."""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table

from flatmin.lab.errors import RunError
from flatmin.lab.runs.directory import run_directories
from flatmin.lab.runs.history import Metrics
from flatmin.lab.spec.fields import finite
from flatmin.lab.training.steps import StepMetrics

NUM_SHOWN = 5
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}  # not tab and newline


class SafeConsole(Console):
    """Prints control characters, with which escape sequences begin, as text: text from a file cannot use them."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of what is printed; rich marks its own controls."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=segment.text.translate(CONTROLS))

    def on_broken_pipe(self) -> None:
        """Let the command end."""
        raise BrokenPipeError


def find_run(name: str, runs: Path) -> Path:
    """Return the directory of a run, given as a path or as the start of a name."""
    for path in (Path(name), runs / name):
        if (path / "spec.json").exists():
            return path
    matching = [path for path in run_directories(runs) if path.name.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        first = ", ".join(path.name for path in matching[:NUM_SHOWN]) + (", ..." if len(matching) > NUM_SHOWN else "")
        raise RunError(f"{len(matching)} runs in {runs} start with {name!r}: {first}. Give more of the name.")
    raise RunError(
        f"{name!r} is neither the directory of a run nor the start of a name in {runs}. "
        f"{where_runs_are(runs) or f'`flatmin list runs --runs {runs}` shows all.'}"
    )


def where_runs_are(runs: Path) -> str:
    """Return one sentence if a directory has no runs: it does not exist, or they are in directories inside; else ""."""
    if not runs.is_dir():
        return f"There is no directory {runs}. Choose another one with --runs."
    inside = sorted({str(path.parent.parent) for path in runs.glob("*/*/spec.json")})
    if inside and not run_directories(runs):
        return f"There are runs in {', '.join(inside)}: choose one with --runs."
    return ""


def table(title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    """Return a table for the terminal whose cells wrap instead of being cut."""
    shown = Table(title=title, title_justify="left")
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*row)
    return shown


def number(value: Any) -> str:
    """Return a value with four digits; nothing for None."""
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def metric(name: str, value: Any) -> str:
    """Return a metric of a run: errors in %, as everywhere, all else with four digits.

    Example:
        >>> metric("test_error", 0.0525), metric("test_loss", 0.0525)
        ('5.25 %', '0.0525')
    """
    return f"{100 * value:.2f} %" if name.endswith("error") and value is not None else number(value)


REFRESH_SECONDS = 0.25  # reading a loss synchronizes with the device: not at every step


class BarCallback(AbstractContextManager["BarCallback"]):
    """A bar with the time left, loss, error, sharpness and images per second, and a line for each epoch."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            console=console,
        )
        self.task = self.bar.add_task("training", total=None, state="")
        self.since, self.num_examples = time.monotonic(), 0

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def on_start(self, directory: Path, num_steps: int, step: int) -> None:
        """Print the run's directory and the step it resumes at."""
        self.console.print(f"{directory}" + (f" resumes at step {step}" if step else ""), style="bold")
        self.bar.start()
        self.bar.update(self.task, total=num_steps, completed=step)

    def on_step(self, step: int, num_examples: int, measured: StepMetrics) -> None:
        """Move the bar."""
        self.num_examples += num_examples
        seconds = time.monotonic() - self.since
        if seconds < REFRESH_SECONDS:
            self.bar.update(self.task, completed=step)
            return
        loss, perturbed = float(measured.at_w.loss), float(measured.perturbed.loss)
        state = f"loss {loss:.3f}  error {100 * float(measured.at_w.error):.1f} %"
        if measured.perturbed is not measured.at_w:
            state += f"  sharpness {perturbed - loss:.3f}"
        self.bar.update(self.task, completed=step, state=f"{state}  {self.num_examples / seconds:.0f} images/s")
        self.since, self.num_examples = time.monotonic(), 0

    def on_epoch(self, metrics: Metrics, speed: Metrics) -> None:
        """Print the epoch's line."""
        self.console.print(epoch_line(metrics, speed))


class JsonCallback:
    """One JSON object per line on standard output; ``event`` is start or epoch (result comes at the end)."""

    def on_start(self, directory: Path, num_steps: int, step: int) -> None:
        """Write where the run is."""
        write_event("start", {"directory": str(directory), "num_steps": num_steps, "step": step})

    def on_step(self, step: int, num_examples: int, measured: StepMetrics) -> None:
        """Write nothing: steps are too many."""

    def on_epoch(self, metrics: Metrics, speed: Metrics) -> None:
        """Write the epoch's metrics and speed."""
        write_event("epoch", {**metrics, **speed})


def write_event(event: str, content: dict[str, Any]) -> None:
    """Write one JSON line to standard output."""
    sys.stdout.write(json.dumps({"event": event, **finite(content)}) + "\n")
    sys.stdout.flush()


def epoch_line(metrics: Metrics, speed: Metrics) -> str:
    """Return an epoch's metrics as one line of text.

    Example:
        >>> epoch_line({"epoch": 2, "train_loss": 0.5, "train_error": 0.25, "lr": 0.1}, {"images_per_second": 300.0})
        'epoch   2  train loss 0.5000  train error 25.00 %  lr 0.1  300 images/s'
    """
    parts = [f"epoch {metrics['epoch']:3d}"]
    for name in ("train", "perturbed", "valid", "test"):
        loss, error = metrics.get(f"{name}_loss"), metrics.get(f"{name}_error")
        if loss is not None and error is not None:
            parts += [f"{name} loss {loss:.4f}", f"{name} error {100 * error:.2f} %"]
    if metrics.get("sharpness") is not None:
        parts.append(f"sharpness {metrics['sharpness']:.4f}")
    return "  ".join([*parts, f"lr {metrics['lr']:.4g}", f"{speed['images_per_second']:.0f} images/s"])
