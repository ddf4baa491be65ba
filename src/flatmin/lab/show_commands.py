"""``flatmin list`` and ``flatmin show``: what there is, and what became of a run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from flatmin.lab.data.catalog import DATASETS
from flatmin.lab.fields import plain
from flatmin.lab.models.names import EXAMPLES
from flatmin.lab.papers.foret2021 import ITEMS
from flatmin.lab.progress import write_event
from flatmin.lab.run_directory import DamagedError, RunError, is_finished, read_result, read_sessions, read_spec
from flatmin.lab.shown import find_run, last_metrics, metric, number, run_directories, table, where_runs_are


@dataclass(frozen=True)
class List:
    """List datasets, networks, tables and figures of the paper, or runs."""

    what: Annotated[Literal["datasets", "models", "items", "runs", "all"], tyro.conf.Positional] = "all"
    """What to list."""
    runs: Path = Path("runs")
    """The folder of all runs."""

    def run(self, console: Console) -> None:
        """Print the tables."""
        if self.what in ("datasets", "all"):
            rows = [(name, info.title, str(info.num_classes)) for name, info in DATASETS.items()]
            rows.append(("folder:PATH", "class folders: PATH/{train,test}/CLASS/*.jpg", "any"))
            console.print(table("Datasets", ("name", "what", "classes"), rows))
        if self.what in ("models", "all"):
            console.print(table("Networks", ("name", "what"), list(EXAMPLES.items())))
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


@dataclass(frozen=True)
class Show:
    """Show a run: what it is, how it went, where it ran."""

    run_name: Annotated[str, tyro.conf.Positional]
    """The run's directory, or its name (or the beginning of it) in the folder of runs."""
    runs: Path = Path("runs")
    """The folder of all runs."""
    output: Literal["table", "json"] = "table"
    """table: for people; json: one JSON object, for scripts."""

    def run(self, console: Console) -> None:
        """Print it."""
        path = find_run(self.run_name, self.runs)
        spec, metrics, sessions = plain(read_spec(path)), last_metrics(path), read_sessions(path)
        if self.output == "json":
            facts = {"directory": str(path), "finished": is_finished(path), "spec": spec, "metrics": metrics}
            write_event("run", facts | {"sessions": sessions})
            return
        rows = [
            (f"{part}.{name}", json.dumps(v)) for part in ("data", "model", "optim") for name, v in spec[part].items()
        ]
        rows += [(name, json.dumps(value)) for name, value in spec.items() if not isinstance(value, dict)]
        console.print(table(str(path), ("setting", "value"), rows))
        console.print(table("Last epoch", ("metric", "value"), [(n, metric(n, v)) for n, v in metrics.items()]))
        if sessions:
            title = f"Where it ran (the last of {len(sessions)} sessions)" if len(sessions) > 1 else "Where it ran"
            console.print(table(title, ("what", "value"), [(n, _fact(v)) for n, v in sessions[-1].items()]))


def _fact(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else number(value)


def _row(path: Path) -> tuple[str, ...]:
    """Return what the list says of a run; one that is damaged must not hide the others."""
    try:
        if is_finished(path):
            result = read_result(path)
            time, metrics = f"{result.time_seconds:.0f} s", result.metrics
        else:
            read_spec(path)
            time, metrics = "unfinished", last_metrics(path)
    except DamagedError as error:
        time, metrics = f"damaged: {error.path.name}", {}
    return (path.name, *(metric(name, metrics.get(name)) for name in ("epoch", "train_error", "test_error")), time)
