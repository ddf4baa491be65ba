"""Writes the tables and the plot of docs/reproduction.md, docs/cost.md and docs/index.md from results/.

    python docs/make_evidence_tables.py

No number in them is typed in by hand: a test compares the tables with the runs.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from dataclasses import replace
from pathlib import Path
from statistics import median

from flatmin.lab.cheap_sam.arms import BASE, SAM
from flatmin.lab.cheap_sam.study import FAMILIES, pareto_front, points_of, results_of, sam_gains, share_of_gain
from flatmin.lab.demo.study import DEMO, METHODS
from flatmin.lab.foret2021.items import ITEMS
from flatmin.lab.foret2021.scales import CUTS
from flatmin.lab.runs.record import Records
from flatmin.lab.studies.cost import cost, num_models, training_flops
from flatmin.lab.studies.study import describe, planned_jobs
from flatmin.lab.sweeps.jobs import Job

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
FEW = {"no SAM": "SGD", "no SAM, twice the epochs": "SGD, twice the epochs", "SAM": "SAM", "part 1/8": "SAM on 1/8"}
FEW |= {"SAM, half the epochs": "SAM, half the epochs", "momentum": "Momentum-SAM"}
"""What the plot on the front page shows, and what it calls them."""


def grid(header, rows):
    """Return a table as Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def claims(known):
    """Return the verdicts, claim by claim; claims that wait for runs are in a list below."""
    rows, waiting = [], {}
    for found in (describe(item, "laptop", known) for item in ITEMS.values()):
        for v in found.verdicts:
            if found.num_missing and v.status == "not tested" and all(c.num_pairs < 2 for c in v.comparisons):
                waiting[found.item] = f"`{found.item}` ({found.num_missing} runs)"
            else:
                rows.append((f"`{found.item}`", v.claim, f"**{v.status}**", v.evidence))
    waits = f"\n\nNot tested, or not in full, with the runs that are missing: {', '.join(waiting.values())}."
    return grid(("item", "claim", "verdict", "evidence"), rows) + (waits if waiting else "")


def costs(known):
    """Return what each item costs on a laptop: the median speed of each model's runs gives the hours."""
    speeds = {}
    for record in known.values():
        if record.state == "finished" and not record.experiment.data.bootstrap:  # which trains two models
            job = Job(experiment=replace(record.experiment, epochs=int(record.metrics["epoch"])))
            speeds.setdefault(record.experiment.model.name, []).append(record.time_seconds / training_flops([job]))
    every = [speed for of_model in speeds.values() for speed in of_model]  # for a model that has not run yet
    rows = []
    for name, item in ITEMS.items():
        jobs = list(planned_jobs(item, "laptop").values())
        by_model = {}
        for job in jobs:
            by_model.setdefault(job.experiment.model.name, []).append(job)
        hours = (
            sum(training_flops(group) * median(speeds.get(model, every)) for model, group in by_model.items())
            / 2
            / 3600
        )
        rows.append((f"`{name}`", item.source, num_models(jobs), f"{cost(jobs) / 1e6:.1f} million", f"{hours:.1f}"))
    return grid(("item", "where", "models", "images forward and backward", "hours of two cores"), rows)


def cuts(_):
    """Return what was cut."""
    return "\n".join(f"- `{item}`: {'; '.join(cuts)}." for item, cuts in CUTS.items())


def finished_conditions(known):
    """Return the conditions of cheap SAM in which training with and without SAM has all replicas."""
    found = results_of("laptop", known)
    return [entries for entries in found if {BASE, SAM} <= {p.name for p in points_of(entries)}]


def arms(known):
    """Return passes, error, share of SAM's gain and place on the front of every arm."""
    blocks = []
    for entries in finished_conditions(known):
        points = points_of(entries)
        front = {p.name for p in pareto_front(points)}
        means, gains = {p.name: p.error.mean for p in points}, sam_gains(entries)
        chosen = {e.method.name: e.chosen.optim.rho for e in entries if e.chosen is not None}
        rows = []
        for p in sorted(points, key=lambda p: (p.cost, p.error.mean)):
            gain = "" if p.name == BASE else f"{round(means[BASE] - p.error.mean, 1) + 0.0:.1f}"  # no -0.0
            rho = f"{chosen[p.name]:g}" if chosen[p.name] else ""
            error = f"{p.error.mean:.1f} ± {p.error.half_width:.1f}"
            share = share_of_gain(means, p.name) if gains else ""
            rows.append((p.name, f"{p.cost:g}", rho, error, gain, share, "yes" if p.name in front else ""))
        header = ("method", "passes", "rho", "test error, %", "gain, points", "share of SAM's gain", "on the front")
        num = len(next(e for e in entries if e.method.name == SAM).replicas.records)
        title = f"**{entries[0].condition.name}** ({num} replicas, mean and 95 % interval):"
        blocks.append(f"{title}\n\n{grid(header, rows)}")
    return "\n\n".join(blocks)


def demo(known):
    """Return test errors with clean and noisy labels, the curvature with noisy ones, and what was tested of SAM."""
    found = describe(DEMO, "laptop", known)
    results = found.tables[0]
    cells = {(row[0], row[1]): dict(zip(results.columns, row, strict=True)) for row in results.rows}

    def text(cell, unit):
        return f"{cell.measured.mean:.1f} ± {cell.measured.half_width:.1f}{unit}"

    rows = []
    for method in METHODS:
        clean, noisy = cells["0%", method], cells["40%", method]
        errors = (text(clean["test error"], " %"), text(noisy["test error"], " %"))
        rows.append((method, *errors, text(noisy["lambda_max"], "")))
    header = ("", "test error, clean labels", "test error, 40 % noisy labels")
    table = grid((*header, "largest eigenvalue of the Hessian, 40 %"), rows)
    return "\n".join([table, "", *(f"- {v.evidence}" for v in found.verdicts if ", SAM has" in v.claim)])


BLOCKS = {
    ("reproduction.md", "claims"): ("foret2021-laptop", claims),
    ("reproduction.md", "cuts"): ("foret2021-laptop", cuts),
    ("reproduction.md", "costs"): ("foret2021-laptop", costs),
    ("cost.md", "arms"): ("cheap-sam-laptop", arms),
    ("index.md", "demo"): ("demo", demo),
}
"""By file and the name between the markers: the study, and what makes the table of its runs."""


def with_block(text, name, block):
    """Return a text with the part between two markers replaced."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n{block}\n{end}{tail}"


def updated_pages():
    """Return the text of each page with all its tables made again."""
    known = {study: Records(ROOT / "results" / study) for study, _ in BLOCKS.values()}
    pages = {file: (ROOT / "docs" / file).read_text() for file, _ in BLOCKS}
    for (file, name), (study, block) in BLOCKS.items():
        pages[file] = with_block(pages[file], name, block(known[study]))
    return pages


def draw_costs(known):
    """Draw error over cost, one color per family, with the front."""
    from matplotlib.figure import Figure

    found = finished_conditions(known)
    figure = Figure(figsize=(15.2, 4.6 * -(-len(found) // 2)), layout="constrained")
    families = list(dict.fromkeys(FAMILIES.values()))
    for number, entries in enumerate(found, 1):
        axis = figure.add_subplot(-(-len(found) // 2), 2, number)
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
    figure.savefig(IMAGES / "cost-pareto.png", dpi=110)


def draw_few_costs(known):
    """Draw error over cost in one condition, a few methods, each with its name next to it."""
    from matplotlib.figure import Figure

    entries = finished_conditions(known)[0]
    points = {p.name: p for p in points_of(entries) if p.name in FEW}
    figure = Figure(figsize=(7.6, 3.9), layout="constrained")
    axis = figure.add_subplot()
    for name, p in points.items():
        color = "C0" if name.startswith("no SAM") else "C1"
        axis.errorbar(p.cost, p.error.mean, p.error.half_width, fmt="o", color=color, capsize=3)
        right = p.cost < 1.9
        place = {"xytext": (9 if right else -9, 0), "textcoords": "offset points", "ha": "left" if right else "right"}
        axis.annotate(FEW[name], (p.cost, p.error.mean), va="center", fontsize=10, **place)
    axis.set(xlim=(0.9, 2.1), xlabel="cost: passes over the training set, relative to SGD", ylabel="test error, %")
    axis.set_title(f"{entries[0].condition.name}: mean of 5 replicas, 95 % interval", fontsize=10, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(visible=True, alpha=0.3)
    figure.savefig(IMAGES / "cost.png", dpi=130)


if __name__ == "__main__":
    for file, text in updated_pages().items():
        (ROOT / "docs" / file).write_text(text)
    cheap_sam = Records(ROOT / "results" / "cheap-sam-laptop")
    draw_costs(cheap_sam)
    draw_few_costs(cheap_sam)
