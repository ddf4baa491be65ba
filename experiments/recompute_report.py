"""Recomputes every number of results/STUDY/report.md from the runs beside it, independently of flatmin.

    python experiments/recompute_report.py                    # all studies in results/
    python experiments/recompute_report.py results/demo

It imports nothing of flatmin: statistics, choices, gates and verdicts are written again from their definitions. It ends
with 1, and a line for each disagreement, if the page and the runs disagree.
"""

import math
import re
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path

from recompute.figures import check_figures, front, reductions
from recompute.items import Item
from recompute.overview import check_answer, check_overview, read_overview
from recompute.page import NUMBER, Tally, interval, read_page
from recompute.rule import TABLE, check_rule_table, outcomes
from recompute.runs import Study, detectable, factor, facts, first_runs, optim
from recompute.settings import check_settings
from recompute.verdicts import check_verdicts, gates
from recompute.zoo import COUNTED, check_counts, check_predictive
from scipy import stats

RESULTS = Path(__file__).parents[1] / "results"
ERRORS = ("train_error", "valid_error", "test_error")


def check(directory, study=None):
    """Return what of a study's page was checked, and what disagrees."""
    study, tally = study or Study(directory), Tally()
    head, sections = read_page((directory / "report.md").read_text())
    items = [Item(study, tally, section) for section in sections if section.item]
    by_title = {section.title: section for section in sections}
    for item in items:
        item.says_missing |= len(items) == 1 and "of this item are missing" in " ".join(by_title["Answer"].lines)
    overview = read_overview(by_title["Overview"], items)

    def attempt(where, function, *arguments):
        """Run a check; a page that it cannot read is a disagreement too."""
        try:
            function(*arguments)
        except (LookupError, StopIteration, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            tally.wrong.append(f"{where}: {function.__name__} cannot read the page: {error!r}")

    def claims(item):
        return [row["claim"] for row in overview if row["item"] is item]

    for item in items:
        item.reductions = lambda method: reductions(items, method)[1]
        attempt(item.name, item.read_tables)
        attempt(item.name, item.check_choices)
        attempt(item.name, item.check_edges)
    for item in sorted(items, key=lambda item: item.name == "error-reduction"):  # it needs the others' comparisons
        attempt(item.name, item.read_comparisons, claims(item))
        attempt(item.name, close_gates, item)
        attempt(item.name, item.correct)
    for item in items:
        attempt(item.name, item.check_comparisons)
        attempt(item.name, check_verdicts, item, items, claims(item))
        for function in (check_figures, check_notes):
            attempt(item.name, function, item, items)
        for function in (check_computed_columns, check_settings):
            attempt(item.name, function, item)
    attempt("overview", check_overview, overview, items, tally)
    attempt("answer", check_answer, by_title["Answer"].lines, overview, tally)
    attempt("head", check_head, [*head, *by_title["Answer"].lines], items, study, tally)
    attempt("list of runs", check_runs, by_title["What was run"], study, tally)
    for section in sections:
        if not section.item and section.title not in ("Answer", "Overview", "What was run"):
            tally.skip(section.title, " ".join(section.lines), "text")
    return tally


def close_gates(item):
    """Say of each comparison whether its gate is closed."""
    for c in (c for group in item.comparisons for c in group):
        c.gated = bool(gates(item, c))


def check_head(head, items, study, tally):
    """Check the number of items, of runs and their time, and the list of missing runs."""
    text = " ".join(head[1:])
    if match := re.search(r"(\d+) items? at scale", text):
        tally.same("counts", "head", int(match[1]), len(items))
    match = re.search(r"(\d+) finished runs? \((.+?) of training\)", text)
    tally.same("counts", "head", int(match[1]), len(study.runs))
    tally.seconds("cost", "head", match[2], sum(run["time_seconds"] for run in study.runs.values()))
    for said in (line.strip("*") for line in head if line.startswith("**With ")):  # a page of one item opens with it
        (item,), (evidence, early) = items, re.fullmatch(r"(.+\.) SGD stopped at .* has ([\d.]+) %\.", said).groups()
        tally.same("answer", "head", any(text.endswith(evidence) for _, text in item.section.verdicts), True)
        stopped = next(c.high for (c,) in item.comparisons if c.names == ("SAM", "SGD, stopped early"))
        tally.number("mean", "head", early, interval(list(stopped.values()))[0])
    alarms = re.findall(r"> - (?:(.+?): )?(\d+) runs? of this item (?:is|are) missing", "\n".join(head))
    alarms = {title or items[0].section.title: int(number) for title, number in alarms}
    for item in items:
        said = re.findall(r"\*\*(\d+) runs? of this item", " ".join(item.section.lines))
        printed = [alarms.get(item.section.title, 0), *(map(int, said))]
        expected = missing(item, items)
        if expected is None:
            tally.skip(f"{item.name}, missing runs", " ".join(map(str, printed)), "text")
            tally.same("missing runs", item.name, len(set(printed)), 1, 0)
        else:
            tally.same("missing runs", item.name, printed, [expected] * len(printed), len(printed))
        about = " ".join(line for line in item.section.lines if "runs of this item" not in line)
        tally.skip(f"{item.name}, what was run", about, "text")
        for block in item.section.blocks:
            if block.caption != "Notes":
                tally.skip(f"{item.name}, {block.caption}", " ".join([block.caption, *block.lines]), "text")


def missing(item, items):
    """Return how many runs of a registered plan do not exist; of Figure 1, those of its tables.

    Without a plan that is 0 if a study is complete, and None, not known, if its page says that runs are missing.
    """
    if item.name == "error-reduction":
        found = [missing(other, items) for other in items if re.match(r"Table [1235],", other.section.source)]
        return None if None in found else sum(found)
    if not item.has_plan and item.says_missing:
        return None
    return item.study.asked(item.planned)[1]


def check_runs(section, study, tally):
    """Check the list of all runs: seeds, epochs, errors, times, and where they were made."""
    rows = section.rows[2:]
    tally.same("counts", "list of runs", [row[0] for row in rows], list(study.runs))
    for name, seed, epochs, *errors, time, cpu, cores, precision, torch, commit, state in rows:
        run = study.runs[name]
        made = study.environments[run["sessions"][-1]["environment"]]
        tally.same("list of runs", name, (int(seed), int(epochs)), (run["seed"], run["spec"]["epochs"]), 2)
        for printed, metric in zip(errors, ERRORS, strict=True):
            value = run["metrics"].get(metric)
            tally.number("list of runs", name, printed, None if value is None else 100 * value)
        tally.seconds("list of runs", name, time, run["time_seconds"])
        commit_of = made["commit"][:10] + "+" * made["commit"].endswith("+")
        expected = [made["cpu"], f"{made['num_cores']} / {made['num_threads']}", made["precision"]]
        expected += [f"torch {made['torch']}", commit_of, "finished"]
        tally.same("list of runs", name, [cpu, cores, precision, torch, commit, state], expected, 4)


def check_computed_columns(item):
    """Check what tables compute of several numbers: passes, shares of a gain, radii, and what is best."""
    for block in item.section.blocks:
        where = f"{item.name}, {block.caption}"
        if "share of SAM's gain" in block.header:
            _arms(item, block)
        elif block.caption == TABLE and block.rows:
            check_rule_table(item, block)
        elif block.caption.startswith("Which to use"):
            expected = [
                [c, f"{cost:g}", name]
                for c in dict.fromkeys(row[0] for row in block.rows)
                for cost, _, name, _ in front(item.arms(c))
            ]
            item.tally.same("choice", where, [row[:3] for row in block.rows], expected, len(expected))
            for row in block.rows:
                _code(item, row[4], item.arm(row[0], row[2]).runs[0], where)
        elif block.header[1:3] == ["rho", "validation error"]:
            _chosen_by_replicas(item, block, where)
        elif block.caption.startswith("The bound on the error"):
            rho = float(re.search(r"rho = ([\d.]+)", block.caption)[1])
            for column, cell in zip(block.header[1:3], block.rows[-1][1:3], strict=True):
                runs = next(e.runs for e in item.entries if e.column == column)
                above = sum(facts(r, "bound", rho=rho)["total"] > 1 for r in runs)
                item.tally.same("bound", where, cell, f"{above} of {len(runs)}", 2)
        elif block.caption.startswith("The condition: what Gaussian noise"):
            for scale, row in zip(("stated", "proof"), block.rows[1::2], strict=True):
                for column, cell in zip(block.header[1:], row[1:], strict=True):
                    runs = next(e.runs for e in item.entries if e.column == column)
                    widths = [facts(r, "noise")[scale]["half_width"] for r in runs]
                    item.tally.number("noise", where, cell, sum(widths) / len(widths), 2)
        elif block.caption == "Predictive power of m-sharpness":
            check_predictive(item, block)
        for caption, _, printed, text, at in ((c, n, p, t, w) for c, n, p, t, w in item.relative if c == block.caption):
            _to_sam(item, caption, _, printed, text, at)


def _code(item, code, run, where):
    """Check the numbers of a line of code against the run's settings."""
    said = {name: float(value) for name, value in re.findall(r"(part|m|weight)=(?:1 / )?(\d+)", code)}
    mine = {name: optim(run, name) for name in ("part", "m", "weight") if optim(run, name)}
    mine |= {"weight": optim(run, "every")} if optim(run, "every") else {}
    mine = {name: 1 / value if name == "part" else float(value) for name, value in mine.items()}
    item.tally.same("setting", where, said, mine, len(said))


def _to_sam(item, condition, name, printed, text, where):
    """Check the difference between an arm and SAM, pair by pair."""
    own, sam = (item.errors(item.arm(condition, n)) for n in (name, item.reference(condition)))
    differences = [own[s] - sam[s] for s in sorted(own.keys() & sam.keys())]
    item.tally.interval("difference", where, printed, differences)
    for one, value in zip(text.partition(" points;")[0].partition(";")[0].split(", "), differences, strict=True):
        item.tally.number("value of a pair", where, one, value, 4)


def _arms(item, block):
    """Check passes, radii and shares of SAM's gain of one condition of our own study."""
    means, sam = {name: mean for _, mean, name, _ in item.arms(block.caption)}, item.reference(block.caption)
    gain = half_width = math.nan
    if {"SGD", sam} <= means.keys():
        without, with_sam = (item.errors(item.arm(block.caption, n)) for n in ("SGD", sam))
        gains = [without[seed] - with_sam[seed] for seed in without.keys() & with_sam.keys()]
        gain, half_width = means["SGD"] - means[sam], stats.t.ppf(0.975, len(gains) - 1) * stats.sem(gains)
    for name, cost, rho, _, _, share, difference in block.rows:
        where = f"{item.name}, {block.caption}, {name}"
        shows = name in means and name not in ("SGD", sam) and gain > 2 * half_width
        item.tally.same("share of SAM's gain", where, bool(share), shows, 0)
        item.tally.same("difference", where, bool(difference), {name, "SGD", sam} <= means.keys() and name != sam, 0)
        if not any(e.caption == block.caption and e.row[0] == name for e in item.entries):
            item.tally.skip(where, cost, "text")  # no run yet
            continue
        run = item.arm(block.caption, name).runs[0]
        item.tally.number("passes", where, cost, item.passes(block.caption, name), 4)
        if rho:
            tried = [r for r in item.study.candidates(run["spec"]) if optim(r, "rho")]
            best = min(tried, key=lambda r: r["metrics"]["valid_error"])
            item.tally.same("choice", where, [rho, optim(run, "rho")], [optim(best, "rho")] * 2)
        if share:
            kept = 100 * (means["SGD"] - means[name]) / gain
            item.tally.number("share of SAM's gain", where, share.removesuffix(" %"), kept)
    text = " ".join(block.lines)
    said = re.search(r"All arms share SGD's settings: lr ([\d.]+), decay (\d+(?:\.\d+)?)\.", text)
    item.tally.same("label", block.caption, f"SAM is “{sam}” here." in text, True, 0)
    runs = [run for e in item.entries if e.caption == block.caption for run in e.runs]
    for printed, name, default in ((said[1], "lr", 0.1), (said[2], "weight_decay", 5e-4)):
        for value in {optim(run, name, default) for run in runs}:
            item.tally.number("choice", block.caption, printed, value, 6)


def _chosen_by_replicas(item, block, where):
    """Check the rho that the replicas' own validation errors choose for each row."""
    for name, rho, *_ in block.rows:
        if rho == "not chosen yet":
            continue
        run = next(e.runs[0] for e in item.entries if e.row[0] == name)
        grid = {}
        for other in item.study.grid(run) if optim(run, "rho") else []:
            replicas = [item.study.runs[n] for s, n in item.study.replicas(other["spec"]).items() if s != 1000]
            grid[factor(optim(other, "rho"))] = sum(r["metrics"]["valid_error"] for r in replicas) / len(replicas)
        best = min(grid, key=grid.__getitem__) if grid else 0.0
        item.tally.same("choice", f"{where}, {name}", factor(optim(run, "rho", 0.0)), best)
        length = best * math.sqrt(item.num_weights()) if optim(run, "p") else best
        item.tally.number("choice", f"{where}, {name}", rho, length, 3)


def check_notes(item, items):
    """Check power, the registered plan, and counts of runs; what quotes the paper is compared with nothing."""
    plan = item.study.plan["items"].get(item.name)
    registered = [] if plan is None else list(plan["rules"])
    registered += [
        f"Changed on {c['date']}: {c['what']} Why: {c['why']} Known by then: {c['known']}"
        for c in item.study.plan["changes"]
        if c["item"] == item.name
    ]
    for line in (line.removeprefix("- ") for line in item.section.block("Notes").lines):
        where, numbers = f"{item.name}, notes", len(NUMBER.findall(line))
        if match := re.search(r"(\d+) pairs show a difference of ([\d.]+) .* standard deviation of ([\d.]+)", line):
            item.tally.number("power", where, match[2], detectable(float(match[3]), int(match[1])), 2)
        elif line in registered:
            item.tally.same("registered text", where, line, line, numbers)
        elif match := re.match(r"The plan was registered (.*) \(commit (\w+)\): (\d+) comparisons", line):
            about = item.study.about["plans"][item.name]
            item.tally.same("registered text", where, about["commit"][:10], match[2])
            item.tally.same("size of a family", where, int(match[3]), len(plan["comparisons"]))
            begun = item.study.begun(item.planned, datetime.fromisoformat(about["date"]))
            early = f"when {begun} of its {item.study.asked(item.planned)[0]} runs had begun"
            item.tally.same("counts", where, match[1], early if begun else "before the first run", 2 * bool(begun))
        elif match := re.match(r"(\d+) of (\d+) runs are missing", line):
            asked, absent = item.study.asked(item.planned)
            item.tally.same("missing runs", where, (int(match[1]), int(match[2])), (absent, asked), 2)
        elif match := re.match(r"(\d+) runs more than the plan's first grids", line):
            first = len({s for g in plan["groups"].values() for s in first_runs(g)})
            item.tally.same("counts", where, int(match[1]), item.study.asked(item.planned)[0] - first)
        elif COUNTED.match(line):
            check_counts(item, line)
        elif match := re.match(r"In (\d+) of (\d+) spectra the largest eigenvalues had not converged", line):
            item.tally.same("counts", where, [int(n) for n in match.groups()], unconverged(item), 2)
        elif match := re.match(r"Not counted: (.+?)\. (.+)\.$", line):
            closed = [(o.condition, o.gate) for o in outcomes(item) if o.complete and o.gate]
            item.tally.same("gate", where, match.groups() in closed, True, numbers)
        elif item.section.source.startswith(("Table", "Figure", "Theorem")):
            item.tally.papers += numbers
        else:
            item.tally.skip(where, line, "text")


def unconverged(item):
    """Return how many spectra of an item's runs had not converged, and how many there are."""
    measured = [
        f for r in item.study.runs.values() if r["spec"]["name"].startswith(item.name) for f in r["measured"].values()
    ]
    spectra = [s for f in measured for s in (f["at_loss"].values() if "at_loss" in f else [f]) if s is not None]
    return [sum(not s["converged"] for s in spectra), len(spectra)]


def main(arguments):
    """Print what was checked; return the exit code."""
    directories = [Path(a) for a in arguments] or sorted(p.parent for p in RESULTS.glob("*/report.md"))
    wrong = 0
    for directory in directories:
        tally = check(directory)
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in tally.checked.most_common())
        print(f"{directory.name}: {tally.checked.total():,} numbers checked ({kinds}); {len(tally.wrong)} disagree.")
        left = Counter()
        for why, _, count in tally.not_checked:
            left[why] += count
        others = ", ".join(f"{count:,} in {why}" for why, count in left.most_common()) or "none"
        print(f"  Compared with nothing: {tally.papers:,} of the paper's; {others}.")
        for line in tally.wrong:
            print(f"  {line}")
        wrong += len(tally.wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
