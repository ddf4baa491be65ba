"""Writes the tables and plots of docs/reproduction.md, cost.md, choosing-rho.md and index.md from results/.

    python docs/make_evidence_tables.py

No number in them is typed in by hand: a test compares the tables with the runs.
"""

# ruff: noqa: ANN001, ANN201, ANN202
import re
from dataclasses import replace
from pathlib import Path
from statistics import median

from flatmin.lab.cheap_sam.arms import BASE
from flatmin.lab.cheap_sam.study import (
    is_complete,
    pareto_front,
    points_of,
    reference,
    results_of,
    sam_gains,
    share_of_gain,
)
from flatmin.lab.demo.study import DEMO
from flatmin.lab.foret2021.items import ITEMS
from flatmin.lab.foret2021.scales import CUTS
from flatmin.lab.rho_rule import RHO_RULE
from flatmin.lab.runs.record import Records
from flatmin.lab.studies.conditions import TUNING_SEED
from flatmin.lab.studies.cost import cost, num_models, training_flops
from flatmin.lab.studies.findings import Cell
from flatmin.lab.studies.methods import FACTORS
from flatmin.lab.studies.study import describe, planned_jobs
from flatmin.lab.sweeps.jobs import Job

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
FEW = {"SGD, stopped early (clean validation)": "SGD, stopped early"}
FEW |= {name: name for name in ("SGD", "SGD, twice the epochs", "SAM on 1/8", "SAM", "SAM, half the epochs")}
"""What the plot on the front page shows, and what it calls them."""


def grid(header, rows):
    """Return a table as Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def claims(known):
    """Return the verdicts, claim by claim; claims that wait for runs are in a list below."""
    rows, waiting = [], []
    for found in (describe(item, "laptop", known) for item in ITEMS.values()):
        if found.num_missing:
            waiting.append(f"`{found.item}` ({found.num_missing} runs)")
        shown = (v for v in found.verdicts if not (found.num_missing and _waits(v)))
        rows += [(f"`{found.item}`", v.claim, f"**{v.status}**", v.evidence) for v in shown]
    waits = f"\n\nNot tested, or not in full, with the runs that are missing: {', '.join(waiting)}."
    return grid(("item", "claim", "verdict", "evidence"), rows) + (waits if waiting else "")


ARMS = {
    "SGD": "SGD",
    "SGD, twice the epochs": "SGD, twice",
    "SGD, stopped early (clean validation)": "SGD, early",
    "SGD, m = 16, twice the epochs": "SGD, m = 16, twice",
    "Mixup": "Mixup",
    "SAM": "SAM",
    "SAM, m = 16": "SAM, m = 16",
    "SAM on 1/8": "SAM on 1/8",
}
"""The columns of the table of errors: methods, and what their columns are called."""
WORDS = {"cifar10": "CIFAR-10", "fashion-mnist": "Fashion-MNIST", "flowers102": "Flowers-102, fine-tuning"}
WORDS |= {"basic": "basic augmentation", "none": "no augmentation", "cutout": "Cutout"}
WORDS |= {f"{noise} %": f"Fashion-MNIST, {noise} % noisy labels" for noise in (20, 40, 80)}

RULE_WORDS = {"wrn-10-2": "WRN-10-2", "40% noise": "40 % noisy labels", "80% noise": "80 % noisy labels"}
RULE_WORDS |= {"char-transformer": "character transformer", "python-text": "text", "digits": "digits"}


def errors(known):
    """Return the test errors of the tables' conditions, the lowest in bold."""
    found = {}
    for name in ("label-noise", "table1", "svhn-fashion", "fine-tuning"):
        shown = describe(ITEMS[name], "laptop", known)
        table = shown.tables[0]  # of test errors, or accuracies
        for row in table.rows:
            labels = [text for text in row if isinstance(text, str)]
            for column, cell in zip(table.columns, row, strict=True):
                if isinstance(cell, Cell) and cell.measured is not None:
                    where, _, method = column.rpartition(": ")
                    method = labels[0] if not where else method
                    condition = ", ".join(WORDS[word] for word in (where, *labels, column) if word in WORDS)
                    mean = 100 - cell.measured.mean if "accuracy" in table.title else cell.measured.mean
                    found.setdefault((shown.place, condition), {})[method] = mean, cell.measured.half_width
    rows = []
    for (place, condition), means in found.items():
        own = {method: means[method] for method in ARMS if method in means}
        lowest = min(own.values())
        texts = {method: f"{mean:.1f} ± {half:.1f}" for method, (mean, half) in own.items()}
        cells = (f"**{texts[m]}**" if own.get(m) == lowest else texts.get(m, "") for m in ARMS)
        rows.append((place, condition, *cells))
    return grid(("", "condition", *ARMS.values()), rows)


def _waits(verdict):
    return verdict.status == "not tested" and all(c.num_pairs < 2 for c in verdict.comparisons)


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


def arms(known):
    """Return passes, error, share of SAM's gain and place on the front of every arm that has all replicas."""
    blocks = []
    for entries in results_of("laptop", known):
        points, sam = points_of(entries), reference(entries)
        means, rhos = {p.name: p.error.mean for p in points}, {e.method.name: e.chosen for e in entries}
        if not {BASE, sam.method.name} <= means.keys():
            continue
        front = {p.name for p in pareto_front(points)} if is_complete(entries) else set()
        rows = []
        for p in sorted(points, key=lambda p: (p.cost, p.error.mean)):
            rho = rhos[p.name].optim.rho_text if rhos[p.name].optim.uses_sam else ""
            share = share_of_gain(means, p.name, sam.method.name) if sam_gains(entries) else ""
            numbers = (f"{p.cost:.4g}", rho, *_error_and_gain(p, means[BASE]), share)
            rows.append((p.name, *numbers, "yes" if p.name in front else ""))
        header = ("method", "passes", "rho", "test error, %", "gain, points", "share of SAM's gain", "on the front")
        title = f"**{entries[0].condition.name}** ({len(sam.replicas.records)} replicas, mean and 95 % interval):"
        blocks.append(f"{title}\n\n{grid(header, rows)}")
    return "\n\n".join(blocks) or "No condition has all replicas of SGD and SAM yet."


def choices(known):
    """Return the validation error at each factor of the suggested radius, and how often the best is near 1."""
    grids = {}
    own = (Records(ROOT / "results" / study) for study in ("rho-rule-laptop", "cheap-sam-laptop"))
    for record in (*known.values(), *(record for records in own for record in records.values())):
        if record.state == "finished" and record.seed == TUNING_SEED:
            name, factor = record.experiment.name.removesuffix(" (choosing)"), record.experiment.optim.rho_factor
            grids.setdefault(name, {})[factor] = record.metrics
    whole = {name: found for name, found in grids.items() if None not in found and len(found) >= len(FACTORS)}
    factors = sorted({factor for found in whole.values() for factor in found})
    rows, num_near = [], 0
    for name, found in sorted(whole.items()):
        best = min(found, key=lambda factor: found[factor]["valid_error"])
        num_near += 0.5 <= best <= 2

        def text(factor, found=found, best=best):
            if factor not in found:
                return ""
            error, left = (100 * found[factor][key] for key in ("valid_error", "train_error"))
            return f"**{error:.1f}** ({left:.0f})" if factor == best else f"{error:.1f} ({left:.0f})"

        item, *condition, method = re.split(r"(?<! 1)(?<!timm)/", name)  # not within "SAM on 1/8" or a model of timm
        suggestion = found[best]["rho"] / best
        rows.append((f"`{item}`", ", ".join(condition), method, f"{suggestion:.3f}", *map(text, factors)))
    header = ("item", "condition", "method", "suggestion", *(f"{factor:g}x" for factor in factors))
    near = f"The best factor is 0.5 to 2 in {num_near} of {len(rows)} rows."
    return f"{grid(header, rows)}\n\n{near}"


def rule(known):
    """Return the study of the suggestion: its radius, the chosen factor, and the errors with and without SAM."""
    (table,) = (t for t in describe(RHO_RULE, "laptop", known).tables if "suggested rho" in t.columns)
    rows = []
    for name, rho, factor, *errors, share in table.rows:
        cells = [f"{cell.measured.mean:.1f} ± {cell.measured.half_width:.1f}" for cell in errors]
        condition = ", ".join(RULE_WORDS.get(word, WORDS.get(word, word)) for word in name.split(", "))
        rows.append((condition, f"{rho.measured.mean:.3f}", f"{factor}x", *cells, share))
    return grid(("condition", "suggestion", "best factor", *table.columns[3:-1], "share kept"), rows)


def _error_and_gain(point, base):
    gain = "" if point.error.mean == base else f"{round(base - point.error.mean, 1) + 0.0:.1f}"  # no -0.0
    return f"{point.error.mean:.1f} ± {point.error.half_width:.1f}", gain


def demo(known):
    """Return test errors with clean and noisy labels, the curvature with noisy ones, and what was tested of SAM."""
    found = describe(DEMO, "laptop", known)
    results = found.tables[0]
    cells = {(row[0], row[1]): dict(zip(results.columns, row, strict=True)) for row in results.rows}

    def text(cell, unit):
        return f"{cell.measured.mean:.1f} ± {cell.measured.half_width:.1f}{unit}"

    rows = []
    for method in (method for noise, method in cells if noise == "0%"):
        clean, noisy = cells["0%", method], cells["40%", method]
        errors = (text(clean["test error"], " %"), text(noisy["test error"], " %"))
        rows.append((method, *errors, text(noisy["lambda_max"], "") if noisy["lambda_max"] else ""))
    header = ("", "test error, clean labels", "test error, 40 % noisy labels")
    table = grid((*header, "largest eigenvalue of the Hessian, 40 %"), rows)
    return "\n".join([table, "", *(f"- {v.evidence}" for v in found.verdicts if ", SAM has" in v.claim)])


BLOCKS = {
    ("reproduction.md", "claims"): ("foret2021-laptop", claims),
    ("reproduction.md", "errors"): ("foret2021-laptop", errors),
    ("reproduction.md", "cuts"): ("foret2021-laptop", cuts),
    ("reproduction.md", "costs"): ("foret2021-laptop", costs),
    ("cost.md", "arms"): ("cheap-sam-laptop", arms),
    ("choosing-rho.md", "choices"): ("foret2021-laptop", choices),
    ("choosing-rho.md", "rule"): ("rho-rule-laptop", rule),
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


def drawn_conditions(known):
    """Return the conditions that have all replicas: title, number of replicas, and cost and error of each arm."""
    found = [entries for entries in results_of("laptop", known) if is_complete(entries)]
    return [(e[0].condition.name, len(e[0].replicas.records), points_of(e)) for e in found]


def draw_costs(found):
    """Draw error over cost, one color per family, with the front."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15.2, 4.6 * -(-len(found) // 2)), layout="constrained")
    families = list(dict.fromkeys(_family(p.name) for _, _, points in found for p in points))
    for number, (title, _, points) in enumerate(found, 1):
        axis = figure.add_subplot(-(-len(found) // 2), 2, number)
        front = pareto_front(points)
        axis.plot([p.cost for p in front], [p.error.mean for p in front], color="0.7", zorder=0, label="Pareto front")
        for p in sorted(points, key=lambda p: -p.error.mean):
            family = _family(p.name)
            marker = "os^D"[[q.name for q in points if _family(q.name) == family].index(p.name) % 4]
            color = f"C{families.index(family)}"
            axis.errorbar(p.cost, p.error.mean, p.error.half_width, fmt=marker, color=color, capsize=3, label=p.name)
        axis.set_title(title)
        axis.set_xlabel("cost: passes over the training set, relative to SGD")
        axis.set_ylabel("test error, %")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    figure.savefig(IMAGES / "cost-pareto.png", dpi=110)


def _family(name):
    """Return what shares a color: "part" of "part 1/8", "SAM" of "SAM, half the epochs"."""
    return re.split(r", (?!m =)| \d| on ", name)[0]


def draw_few_costs(found):
    """Draw error over cost in one condition, a few methods, each with its name next to it."""
    from matplotlib.figure import Figure

    title, num, points = found[0]
    figure = Figure(figsize=(7.6, 3.9), layout="constrained")
    axis = figure.add_subplot()
    shown = [p for p in points if p.name in FEW]
    for p in shown:
        color = "C0" if p.name.startswith(BASE) else "C1"
        axis.errorbar(p.cost, p.error.mean, p.error.half_width, fmt="o", color=color, capsize=3)
        close = [q for q in shown if abs(q.error.mean - p.error.mean) < 2 and 0 < q.cost - p.cost < 0.4]
        right = p.cost < 1.9 and not close  # its name would cover its neighbor's
        place = {"xytext": (9 if right else -9, 0), "textcoords": "offset points", "ha": "left" if right else "right"}
        axis.annotate(FEW[p.name], (p.cost, p.error.mean), va="center", fontsize=10, **place)
    lowest = min(0.9, *(p.cost - 0.1 for p in shown))
    axis.set(xlim=(lowest, 2.1), xlabel="cost: passes over the training set, relative to SGD", ylabel="test error, %")
    axis.set_title(f"{title}: mean of {num} replicas, 95 % interval", fontsize=10, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(visible=True, alpha=0.3)
    figure.savefig(IMAGES / "cost.png", dpi=130)


if __name__ == "__main__":
    for file, text in updated_pages().items():
        (ROOT / "docs" / file).write_text(text)
    drawn = drawn_conditions(Records(ROOT / "results" / "cheap-sam-laptop"))
    draw_costs(drawn)
    draw_few_costs(drawn)
