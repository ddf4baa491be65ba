"""``flatmin demo``: SGD and SAM on 500 embedded digits, in minutes on two cores."""

from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from flatmin.lab.commands.report import write_page
from flatmin.lab.demo.study import DEMO
from flatmin.lab.runs.record import Records
from flatmin.lab.studies.findings import Cell, Findings
from flatmin.lab.studies.study import describe, run_study
from flatmin.lab.sweeps.sweep import Sweeper


@dataclass(frozen=True)
class Demo:
    """Train on 500 embedded digits with SGD and SAM, with clean and with noisy labels; write a page on the results."""

    runs: Path = Path("runs/demo")
    """Where the runs and the page (index.html) go."""
    processes: int = 0
    """How many models to train at once, each on one thread; 0 is one for each core."""

    def run(self, console: Console) -> None:
        """Train, measure, print the table, write the page."""
        known = Records(self.runs)
        with Sweeper(runs=self.runs, processes=self.processes, console=console) as sweeper:
            run_study(DEMO, "laptop", known, sweeper.run)
        findings = describe(DEMO, "laptop", known)
        print_results(findings, console)
        page = write_page([findings], known, self.runs, "SAM on 500 handwritten digits")
        console.print(f"The page with curves, spectra and landscapes: {page}")


def print_results(findings: Findings, console: Console) -> None:
    """Print the table of results, which fits 80 columns, and the verdicts."""
    results = findings.tables[0]
    shown = Table(
        title=f"{results.title}; errors in %", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False
    )
    for name in results.columns[1:]:
        shown.add_column(name, no_wrap=True)
    for noise in dict.fromkeys(str(row[0]) for row in results.rows):
        shown.add_section()
        shown.add_row("clean labels" if noise == "0%" else noise.replace("%", " % noisy labels"), style="bold")
        for row in (row for row in results.rows if row[0] == noise):
            shown.add_row(*(_text(entry) if isinstance(entry, Cell) else str(entry) for entry in row[1:]))
    console.print(shown)
    for verdict in findings.verdicts:
        console.print(verdict.evidence, highlight=False, markup=False)


def _text(cell: Cell) -> str:
    if cell.measured is None:
        return "failed"
    return str(cell.measured) if cell.unit == "%" else f"{cell.measured.mean:.2g}"
