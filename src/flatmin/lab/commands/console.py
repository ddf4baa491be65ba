"""Runs, tables and numbers on the command line."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from flatmin.lab.errors import RunError
from flatmin.lab.runs.directory import run_directories

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
