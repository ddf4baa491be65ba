"""``flatmin measure``: how flat is the minimum of a run?"""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import tyro
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from flatmin.lab.commands.console import find_run, number, table, write_event
from flatmin.lab.errors import RunError
from flatmin.lab.sweeps.measurements import Bound, Landscape, Measurement, Rho, Sharpness, Spectrum, measure_run

SHOWN_LISTS = ("eigenvalues", "residuals", "per_batch")  # the others: in the files
RISES = {"rhos": "rho", "rises": "rise of the loss", "first_order": "to first order"}
"""What is measured at several radii, and the columns of its table."""
M = TypeVar("M", bound=Measurement)


@dataclass(frozen=True)
class MeasureRun(Generic[M]):
    """Measure a run, which need not be finished, or show what was measured before."""

    run_name: Annotated[str, tyro.conf.Positional]
    """The run's directory, or its name (or the start of it) in the directory of runs."""
    measurement: Annotated[M, tyro.conf.arg(name="")]
    runs: Path = Path("runs")
    """The directory of all runs."""
    data_root: Path | None = None
    """The first directory in which datasets are searched for."""
    output: Literal["table", "json"] = "table"
    """table: human-readable; json: one JSON object."""

    def run(self, console: Console) -> None:
        """Measure, write JSON and plots to RUN/measures, print the numbers."""
        path = find_run(self.run_name, self.runs)
        with self._shown_to_be_working(path):
            try:
                ((name, facts),) = measure_run(path, [self.measurement], self.data_root).items()
            except ValueError as error:  # what the measures say of settings, losses and data they cannot take
                raise RunError(f"{path} cannot be measured with these settings: {error}") from error
        target = path / "measures" / name
        if self.output == "json":
            write_event("measure", {"file": f"{target}.json", **facts})
            return
        rows = [(name, text) for name, value in facts.items() if (text := _cell(name, value))]
        files = sorted(file.name for file in target.parent.glob(f"{target.name}.*") if file.suffix != ".cache")
        if facts.keys() >= RISES.keys():
            numbers = zip(*(map(number, facts[key]) for key in RISES), strict=True)
            console.print(table("The loss over rho", tuple(RISES.values()), list(numbers)))
        console.print(table(f"{path}/measures", ("what", "value"), [*rows, ("files", "\n".join(files))]))

    def _shown_to_be_working(self, path: Path) -> Any:
        kind = self.measurement.kind
        if kind == "landscape":  # it has its own progress bar
            return nullcontext()
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        bar.add_task(f"{kind} of {path.name}", total=None)
        return bar


def _subcommand(kind: type[Measurement]) -> Any:
    return tyro.conf.subcommand(kind.kind, prefix_name=False, description=kind.__doc__)


@dataclass(frozen=True)
class Measure:
    """Measure how flat the minimum of a run is; the run need not be finished."""

    what: (
        Annotated[MeasureRun[Sharpness], _subcommand(Sharpness)]
        | Annotated[MeasureRun[Spectrum], _subcommand(Spectrum)]
        | Annotated[MeasureRun[Landscape], _subcommand(Landscape)]
        | Annotated[MeasureRun[Bound], _subcommand(Bound)]
        | Annotated[MeasureRun[Rho], _subcommand(Rho)]
    )

    def run(self, console: Console) -> None:
        """Measure."""
        self.what.run(console)


def _cell(name: str, value: Any) -> str | None:
    """Return a fact as the table shows it; None if it does not."""
    if name == "standard_error" and value is None:
        return "unknown (one subset)"
    if not isinstance(value, list):
        return number(value)
    return ", ".join(map(number, value)) if name in SHOWN_LISTS else None
