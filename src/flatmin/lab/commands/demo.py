"""``flatmin demo``: SGD and SAM on 500 embedded digits, in minutes on two cores."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from flatmin.lab.commands.console import table
from flatmin.lab.commands.report import write_page
from flatmin.lab.runs.record import Records
from flatmin.lab.studies.findings import Cell, Findings
from flatmin.lab.studies.study import describe, run_study


@dataclass(frozen=True)
class Demo:
    """Train on 500 embedded digits with SGD and SAM, with clean and with noisy labels; write a page on the results."""

    runs: Path = Path("runs/demo")
    """Where the runs and the page (index.html) go."""
    processes: int = 0
    """How many models to train at once, each on one thread; 0 is one for each core."""

    def run(self, console: Console) -> None:
        """Train, measure, print the table, write the page."""
        from flatmin.lab.demo.study import DEMO
        from flatmin.lab.sweeps.sweep import Sweeper

        known = Records(self.runs)
        with Sweeper(runs=self.runs, processes=self.processes, console=console) as sweeper:
            run_study(DEMO, "laptop", known, sweeper.run)
        findings = describe(DEMO, "laptop", known)
        print_results(findings, console)
        page = write_page([findings], known, self.runs, "SAM on 500 handwritten digits")
        console.print(f"The page with curves, spectra and landscapes: {page}")


def print_results(findings: Findings, console: Console) -> None:
    """Print the table of results and the verdicts."""
    results = findings.tables[0]
    columns = [f"{name} %" if name.endswith("error") else name for name in results.columns]
    rows = [tuple(_text(entry) if isinstance(entry, Cell) else str(entry) for entry in row) for row in results.rows]
    console.print(table(f"500 digits: {results.title}", columns, rows))
    for verdict in findings.verdicts:
        console.print(verdict.evidence, highlight=False, markup=False)


def _text(cell: Cell) -> str:
    return "failed" if cell.measured is None else str(cell.measured)
