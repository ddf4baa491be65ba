"""``flatmin list``: datasets, models, tables and figures of the paper, runs; ``flatmin show``: one run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from flatmin.lab.commands.console import find_run, metric, number, table, where_runs_are, write_event
from flatmin.lab.commands.report import ITEMS
from flatmin.lab.errors import CorruptFileError, RunError
from flatmin.lab.runs.directory import is_finished, last_metrics, read_result, read_spec, run_directories
from flatmin.lab.runs.environment import read_sessions
from flatmin.lab.runs.history import Metrics
from flatmin.lab.spec.datasets import DATASETS
from flatmin.lab.spec.fields import plain
from flatmin.lab.spec.models import EXAMPLES
from flatmin.lab.sweeps.progress import time_text


@dataclass(frozen=True)
class List:
    """List datasets, models, tables and figures of the paper, or runs."""

    what: Annotated[Literal["datasets", "models", "items", "runs", "all"], tyro.conf.Positional] = "all"
    """What to list."""
    runs: Path = Path("runs")
    """The directory of all runs."""

    def run(self, console: Console) -> None:
        """Print the tables."""
        if self.what in ("datasets", "all"):
            rows = [(name, info.title, str(info.num_classes)) for name, info in DATASETS.items()]
            rows.append(("folder:PATH", "class directories: PATH/{train,test}/CLASS/*.jpg", "any"))
            console.print(table("Datasets", ("name", "what", "classes"), rows))
        if self.what in ("models", "all"):
            console.print(table("Models", ("name", "what"), list(EXAMPLES.items())))
        if self.what in ("items", "all"):
            items = [(item.name, item.source, item.title) for item in ITEMS.values()]
            console.print(table("Tables and figures (flatmin reproduce)", ("name", "where", "what"), items))
        if self.what in ("runs", "all"):
            self._print_runs(console)

    def _print_runs(self, console: Console) -> None:
        paths, hint = run_directories(self.runs), where_runs_are(self.runs)
        if self.what == "runs" and not self.runs.is_dir():
            raise RunError(hint)
        if paths or not hint:
            columns = ("run", "epochs", "train error", "test error", "time")
            console.print(table(f"Runs in {self.runs}", columns, [_row(path) for path in paths]))
        if hint:
            console.print(hint)


def _row(path: Path) -> tuple[str, ...]:
    """Return the row of a run; a corrupt one is marked and does not hide the others."""
    metrics: Metrics = {}
    try:
        read_spec(path)
        metrics = last_metrics(path)
        time = time_text(read_result(path).time_seconds) if is_finished(path) else "unfinished"
    except CorruptFileError as error:
        time = f"corrupt: {error.path.name}"
    return (path.name, *(metric(name, metrics.get(name)) for name in ("epoch", "train_error", "test_error")), time)


@dataclass(frozen=True)
class Show:
    """Show a run: its settings, its last metrics, where it ran."""

    run_name: Annotated[str, tyro.conf.Positional]
    """The run's directory, or its name (or the start of it) in the directory of runs."""
    runs: Path = Path("runs")
    """The directory of all runs."""
    output: Literal["table", "json"] = "table"
    """table: human-readable; json: one JSON object."""

    def run(self, console: Console) -> None:
        """Print it."""
        path = find_run(self.run_name, self.runs)
        spec, metrics, sessions = plain(read_spec(path)), last_metrics(path), read_sessions(path)
        if self.output == "json":
            content = {"directory": str(path), "finished": is_finished(path), "spec": spec, "metrics": metrics}
            write_event("run", content | {"sessions": sessions})
            return
        rows = [
            (f"{part}.{name}", json.dumps(v)) for part in ("data", "model", "optim") for name, v in spec[part].items()
        ]
        rows += [(name, json.dumps(value)) for name, value in spec.items() if not isinstance(value, dict)]
        console.print(table(str(path), ("setting", "value"), rows))
        console.print(table("Last epoch", ("metric", "value"), [(n, metric(n, v)) for n, v in metrics.items()]))
        if sessions:
            facts = [(n, " ".join(map(str, v)) if isinstance(v, list) else number(v)) for n, v in sessions[-1].items()]
            title = f"Where it ran (the last of {len(sessions)} sessions)" if len(sessions) > 1 else "Where it ran"
            console.print(table(title, ("what", "value"), facts))
