"""The command ``flatmin``: demo, train, reproduce, report, list, show, measure.

Exit codes: 0 done; 1 a fault of flatmin; 2 a wrong command, setting, network or run; 3 data missing or damaged; 4
nothing can be written; 5 the loss diverged; 128 + n stopped by signal n (130 Ctrl-C, 143 SIGTERM), everything saved.
"""

import json
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
    from rich.table import Table
except ImportError as missing:  # pragma: no cover (the tests have them)
    sys.exit(f"flatmin's command line needs the extra `lab` ({missing.name} is missing): pip install 'flatmin[lab]'")

from flatmin.lab.checkpoint import StorageError
from flatmin.lab.data.catalog import DATASETS
from flatmin.lab.data.images import DataError
from flatmin.lab.demo import Demo
from flatmin.lab.engine import CHECKPOINT_SECONDS, DivergedError, InterruptedRun, train
from flatmin.lab.models.names import EXAMPLES
from flatmin.lab.models.weights import ModelError
from flatmin.lab.papers.foret2021 import ITEMS
from flatmin.lab.progress import BarListener, JsonListener, write_event
from flatmin.lab.reproduce import Report, Reproduce
from flatmin.lab.run_directory import Result, RunError, read_result
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
    """Initial weights, order, augmentation, random layers."""
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
            console.print(_table("Datasets", ("name", "what", "classes"), rows))
        if self.what in ("models", "all"):
            console.print(_table("Networks", ("name", "what"), list(EXAMPLES.items())))
        if self.what in ("items", "all"):
            items = [(item.name, item.source, item.title) for item in ITEMS.values()]
            console.print(_table("Tables and figures (flatmin reproduce)", ("name", "where", "what"), items))
        if self.what in ("runs", "all"):
            runs = [_run_row(path.parent) for path in sorted(self.runs.glob("*/spec.json"))]
            columns = ("run", "epochs", "train error", "test error", "time")
            console.print(_table(f"Runs in {self.runs}", columns, runs))


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
        path = _find_run(self.run_name, self.runs)
        spec, metrics = json.loads((path / "spec.json").read_text()), _last_metrics(path)
        if self.output == "json":
            environment = path / "environment.json"
            facts = json.loads(environment.read_text()) if environment.exists() else {}
            finished = (path / "result.json").exists()
            write_event("run", {"directory": str(path), "finished": finished, "spec": spec, "metrics": metrics} | facts)
            return
        rows = [
            (f"{part}.{name}", json.dumps(v)) for part in ("data", "model", "optim") for name, v in spec[part].items()
        ]
        rows += [(name, json.dumps(value)) for name, value in spec.items() if not isinstance(value, dict)]
        console.print(_table(str(path), ("setting", "value"), rows))
        console.print(_table("Last epoch", ("metric", "value"), [(n, _number(v)) for n, v in metrics.items()]))


@dataclass(frozen=True)
class Measured:
    """What all measures have in common."""

    run_name: Annotated[str, tyro.conf.Positional]
    """The run's directory, or its name (or the beginning of it) in the folder of runs."""
    runs: Path = Path("runs")
    """The folder of all runs."""
    data_root: Path | None = None
    """The first folder in which datasets are looked for."""
    num_examples: int | None = None
    """Measure on the first so many training examples; on all if None."""
    output: Literal["table", "json"] = "table"
    """table: for people; json: one JSON object, for scripts."""

    def measure(self, trained: Any, folder: Path) -> dict[str, Any]:
        """Measure, and write what was found into a folder."""
        raise NotImplementedError

    def run(self, console: Console) -> None:
        """Measure, write JSON and pictures into RUN/measures, print the numbers."""
        from flatmin.lab.trained import load_trained

        path = _find_run(self.run_name, self.runs)
        facts = self.measure(load_trained(path, data_root=self.data_root), path / "measures")
        if self.output == "json":
            write_event("measure", facts)
            return
        rows = [(name, _number(value)) for name, value in facts.items() if not isinstance(value, list)]
        console.print(_table(f"{path}/measures", ("what", "value"), rows))


@dataclass(frozen=True)
class MeasureSharpness(Measured):
    """m-sharpness: how far the loss rises within rho, on subsets of m examples (Section 4.1)."""

    rho: float = 0.05
    """Radius of the ball."""
    m: int | None = None
    """Examples in a subset; all if None."""
    steps: int = 1
    """Ascent steps."""

    def measure(self, trained: Any, folder: Path) -> dict[str, Any]:
        """Measure it."""
        from flatmin.lab.measuring import measure_sharpness

        keywords: dict[str, Any] = {"rho": self.rho, "m": self.m, "steps": self.steps}
        return measure_sharpness(trained, folder, num_examples=self.num_examples, **keywords)


@dataclass(frozen=True)
class MeasureSpectrum(Measured):
    """The Hessian's largest eigenvalues and spectral density (Section 4.2)."""

    num_eigenvalues: int = 5
    """How many of the largest."""
    steps: int = 80
    """Lanczos steps of the density."""
    probes: int = 4
    """Random starts of the density."""

    def measure(self, trained: Any, folder: Path) -> dict[str, Any]:
        """Measure it."""
        from flatmin.lab.measuring import measure_spectrum

        keywords = {"num_eigenvalues": self.num_eigenvalues, "steps": self.steps, "probes": self.probes}
        return measure_spectrum(trained, folder, num_examples=self.num_examples, **keywords)


@dataclass(frozen=True)
class MeasureLandscape(Measured):
    """The loss on a plane of random, filter-normalised directions (Figure 1)."""

    span: float = 1.0
    """How far the plane goes, in units of the directions."""
    points: int = 51
    """Points along each side; odd."""

    def measure(self, trained: Any, folder: Path) -> dict[str, Any]:
        """Measure it."""
        from flatmin.lab.measuring import measure_landscape

        return measure_landscape(trained, folder, span=self.span, points=self.points, num_examples=self.num_examples)


@dataclass(frozen=True)
class MeasureBound(Measured):
    """The PAC-Bayes bound on the error, term by term (Appendix A)."""

    rho: float = 0.05
    """Radius of the ball."""
    delta: float = 0.05
    """The probability with which the bound may fail."""

    def measure(self, trained: Any, folder: Path) -> dict[str, Any]:
        """Measure it."""
        from flatmin.lab.measuring import measure_bound

        return measure_bound(trained, folder, rho=self.rho, delta=self.delta, num_examples=self.num_examples)


def _summary(result: Result) -> str:
    errors = [f"{name} error {100 * (result.metrics.get(f'{name}_error') or 0.0):.2f} %" for name in ("valid", "test")]
    errors = errors if "valid_error" in result.metrics else errors[1:]
    return f"{result.directory}: {', '.join(errors)} after {len(result.history)} epochs, {result.time_seconds:.0f} s"


def _run_row(path: Path) -> tuple[str, ...]:
    if (path / "result.json").exists():
        result = read_result(path)
        time, metrics = f"{result.time_seconds:.0f} s", result.metrics
    else:
        time, metrics = "unfinished", _last_metrics(path)
    return (path.name, *(_number(metrics.get(name)) for name in ("epoch", "train_error", "test_error")), time)


def _last_metrics(path: Path) -> dict[str, Any]:
    file = path / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    metrics: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return metrics


def _find_run(name: str, runs: Path) -> Path:
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


def _table(title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


@dataclass(frozen=True)
class Measure:
    """Measure how flat the minimum is that a run found; needs no finished run, only a checkpoint."""

    what: (
        Annotated[MeasureSharpness, tyro.conf.subcommand("sharpness", prefix_name=False)]
        | Annotated[MeasureSpectrum, tyro.conf.subcommand("spectrum", prefix_name=False)]
        | Annotated[MeasureLandscape, tyro.conf.subcommand("landscape", prefix_name=False)]
        | Annotated[MeasureBound, tyro.conf.subcommand("bound", prefix_name=False)]
    )

    def run(self, console: Console) -> None:
        """Measure."""
        self.what.run(console)


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
