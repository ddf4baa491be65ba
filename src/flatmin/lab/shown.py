"""Runs and numbers as people and scripts meet them on the command line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from flatmin.lab.run_directory import RunError


def last_metrics(path: Path) -> dict[str, Any]:
    """Return the metrics of the last epoch that a run has completed; none if there is none."""
    file = path / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    metrics: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return metrics


def find_run(name: str, runs: Path) -> Path:
    """Return the directory of a run, given as a path or as the beginning of a name.

    Raises:
        RunError: no run, or several, fit.
    """
    if (Path(name) / "spec.json").exists():
        return Path(name)
    found = [path.parent for path in sorted(runs.glob("*/spec.json")) if path.parent.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(p.name for p in found) or "none; `flatmin list runs` shows all"
    raise RunError(f"{name!r} is neither the directory of a run nor the beginning of one name in {runs} ({known}).")


def table(title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    """Return a table for the terminal whose cells break instead of being cut."""
    found = Table(title=title, title_justify="left")
    for column in columns:
        found.add_column(column, overflow="fold")
    for row in rows:
        found.add_row(*row)
    return found


def number(value: Any) -> str:
    """Return a value with four digits; nothing for None."""
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
