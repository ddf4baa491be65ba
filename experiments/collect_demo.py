"""Collect the demo: the small files of its runs, its page, and the table on the documentation's home page.

    flatmin demo && python experiments/collect_demo.py runs/demo

Without a directory, page and table are written again from results/. A test compares the table with the runs.
"""

import sys
from pathlib import Path

from collect_results import ROOT, copy_small_files, with_block

from flatmin.lab.demo.study import METHODS, demo
from flatmin.lab.report import write_report
from flatmin.lab.studies.findings import Findings
from flatmin.lab.studies.statistics import Interval
from flatmin.lab.sweeps.runners import ReadOnlyRunner

RESULTS = ROOT / "results" / "demo"
DOCS = ROOT / "docs" / "index.md"
TITLE = "SAM on 500 handwritten digits"


def table(found: Findings) -> str:
    """Return test errors with clean and noisy labels, the curvature with noisy ones, and what was tested of SAM."""
    results = found.tables[0]
    cells = {(row[0], row[1]): dict(zip(results.columns, row, strict=True)) for row in results.rows}
    lines = [
        "| | test error, clean labels | test error, 40 % noisy labels | largest eigenvalue of the Hessian, 40 % |",
        "|---|---|---|---|",
    ]
    for method in METHODS:
        clean, noisy = cells["0%", method], cells["40%", method]
        shown = [(clean["test error"], " %"), (noisy["test error"], " %"), (noisy["lambda_max"], "")]
        lines.append(f"| {method} | {' | '.join(_text(cell.measured) + unit for cell, unit in shown)} |")
    return "\n".join([*lines, "", *(f"- {v.evidence}" for v in found.verdicts if ", SAM has" in v.claim)])


def _text(interval: Interval) -> str:
    return f"{interval.mean:.1f} ± {interval.half_width:.1f}"


def main() -> None:
    if len(sys.argv) > 1:
        source = Path(sys.argv[1])
        copy_small_files(set(demo(ReadOnlyRunner(source)).runs), source, RESULTS / "runs")
    found = demo(ReadOnlyRunner(RESULTS / "runs"))
    write_report([found], runs=RESULTS / "runs", out=RESULTS, title=TITLE)
    DOCS.write_text(with_block(DOCS.read_text(), "demo", table(found)))


if __name__ == "__main__":
    main()
