"""``flatmin list``: datasets, models, tables and figures of the paper, runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from flatmin.lab.commands.console import metric, table, where_runs_are
from flatmin.lab.commands.report import ITEMS
from flatmin.lab.errors import CorruptFileError, RunError
from flatmin.lab.runs.directory import Metrics, is_finished, last_metrics, read_result, read_spec, run_directories
from flatmin.lab.spec.datasets import DATASETS
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
