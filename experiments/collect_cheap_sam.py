"""Collect the study of cheap SAM: the small files of finished runs, its page, and the table and plot of docs/cost.md.

    python experiments/collect_cheap_sam.py RUNS

Without RUNS, page, table and plot are written again from results/. No number in them is typed in by hand: a test
compares the table with the runs.
"""

import math
import sys
from pathlib import Path

from collect_results import ROOT, copy_small_files, with_block

from flatmin.lab.cheap_sam.arms import BASE, SAM, conditions
from flatmin.lab.cheap_sam.study import CHEAP_SAM, FAMILIES, pareto_front, points_of, share_of_gain
from flatmin.lab.report import write_report
from flatmin.lab.studies.conditions import MethodResult, run_conditions
from flatmin.lab.studies.plan import with_all_missing
from flatmin.lab.sweeps.runners import ReadOnlyRunner

RESULTS = ROOT / "results" / "cheap-sam-laptop"
DOCS = ROOT / "docs" / "cost.md"
PLOT = ROOT / "docs" / "images" / "cost-pareto.png"
TITLE = "SAM at nearly the cost of SGD: error over cost"


def finished(runs: Path) -> list[list[MethodResult]]:
    """Return the results of each condition in which training with and without SAM has all their replicas."""
    runner = ReadOnlyRunner(runs)
    found = [run_conditions([condition], runner, "cheap-sam", seeds) for condition, seeds in conditions("laptop")]
    return [entries for entries in found if {BASE, SAM} <= {p.name for p in points_of(entries)}]


def table(runs: Path) -> str:
    """Return passes, error, share of SAM's gain and place on the front of every arm, as Markdown."""
    blocks = []
    for entries in finished(runs):
        points = points_of(entries)
        front = {p.name for p in pareto_front(points)}
        means = {p.name: p.error.mean for p in points}
        chosen = {e.method.name: e.chosen.optim.rho for e in entries if e.chosen is not None}
        lines = [
            "| method | passes | rho | test error, % | gain, points | share of SAM's gain | on the front |",
            "|---|---|---|---|---|---|---|",
        ]
        for p in sorted(points, key=lambda p: (p.cost, p.error.mean)):
            gain = "" if p.name == BASE else f"{round(means[BASE] - p.error.mean, 1) + 0.0:.1f}"  # no -0.0
            rho = f"{chosen[p.name]:g}" if chosen[p.name] else ""
            error = f"{p.error.mean:.1f} ± {p.error.half_width:.1f}"
            cells = [p.name, f"{p.cost:g}", rho, error, gain, share_of_gain(means, p.name)]
            lines.append(f"| {' | '.join(cells)} | {'yes' if p.name in front else ''} |")
        num = len(next(e for e in entries if e.method.name == SAM).replicas.outcomes)
        blocks.append(
            f"**{entries[0].condition.name}** ({num} replicas, mean and 95 % interval):\n\n" + "\n".join(lines)
        )
    return "\n\n".join(blocks) if blocks else "No condition is finished yet."


def draw(runs: Path) -> None:
    """Draw error over cost, one color per family, with the front."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = finished(runs)
    if not found:
        return
    num_rows = math.ceil(len(found) / 2)
    figure, axes = plt.subplots(num_rows, 2, figsize=(15.2, 4.6 * num_rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(found) :]:
        axis.remove()
    families = list(dict.fromkeys(FAMILIES.values()))
    for axis, entries in zip(axes.flat, found, strict=False):
        points = points_of(entries)
        front = pareto_front(points)
        axis.plot([p.cost for p in front], [p.error.mean for p in front], color="0.7", zorder=0, label="Pareto front")
        for p in sorted(points, key=lambda p: -p.error.mean):
            family = FAMILIES[p.name]
            marker = "os^D"[[q.name for q in points if FAMILIES[q.name] == family].index(p.name) % 4]
            color = f"C{families.index(family)}"
            axis.errorbar(p.cost, p.error.mean, p.error.half_width, fmt=marker, color=color, capsize=3, label=p.name)
        axis.set_title(entries[0].condition.name)
        axis.set_xlabel("cost: passes over the training set, relative to training without SAM")
        axis.set_ylabel("test error, %")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    figure.savefig(PLOT, dpi=110)


def main() -> None:
    study = CHEAP_SAM.study
    if len(sys.argv) > 1:
        source = Path(sys.argv[1])
        copy_small_files(set(study("laptop", ReadOnlyRunner(source)).runs), source, RESULTS / "runs")
    runner = ReadOnlyRunner(RESULTS / "runs")
    write_report(
        [with_all_missing(study("laptop", runner), study, runner)], runs=RESULTS / "runs", out=RESULTS, title=TITLE
    )
    DOCS.write_text(with_block(DOCS.read_text(), "arms", table(RESULTS / "runs")))
    draw(RESULTS / "runs")


if __name__ == "__main__":
    main()
