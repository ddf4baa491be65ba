"""The first screens of a page: the answer, and the overview of all claims. Imports nothing of flatmin."""

import re
from collections import Counter

from recompute.comparisons import P_VALUE
from recompute.page import NOTHING, interval
from recompute.runs import passes, without_sam

REPEATED = ("error-reduction", "rho-0.05")
"""Items that repeat other items' comparisons: their verdicts are not counted in the totals."""
KEPT = ("kept", "not kept")
TESTS = ("reproduced", "not reproduced", "inconclusive")
EFFECT = re.compile(
    r"(lowers|raises) (?:the test error|it) by ([\d.]+ ± [\d.]+)(?: points)? vs\. ((?:(?! \(n = ).)+) "
    rf"\(n = (\d+), ({P_VALUE})(; not significant)?(; ours)?\)"
)


def read_overview(section, items):
    """Return the overview's claims, each with its item and the lines of its effects."""
    claims = []
    for row in section.rows[2:]:
        if row[0]:
            claims.append(
                {"number": row[0], "claim": row[1], "status": row[2].strip("*"), "cost": row[6], "effects": []}
            )
        claims[-1]["effects"] += [row[3:6]] if row[3] != NOTHING else []
    owners = [(item, index) for item in items for index in range(len(item.section.verdicts))]
    for claim, (item, index) in zip(claims, owners, strict=True):
        claim["item"], claim["index"] = item, index
        if len(items) > 1:
            claim["claim"] = claim["claim"].removesuffix(f" ({item.name})")
    return claims


def check_overview(overview, items, tally):
    """Check every claim's status, effects in points and in %, n, corrected p-values and cost."""
    tally.same("label", "overview", [row["number"] for row in overview], [str(i + 1) for i in range(len(overview))], 0)
    for row in overview:
        item, index = row["item"], row["index"]
        where = f"overview: {row['claim']}"
        status, text = item.section.verdicts[index]
        tally.same("verdict", where, row["status"], status)
        tally.same("verdict", where, text.startswith(row["claim"]), True, 0)
        compared = [c for c in item.comparisons[index] if c.differences]
        tally.same("effect", where, len(row["effects"]), len(compared), 0)
        for (effect, n, p), c in zip(row["effects"], compared, strict=False):
            match = re.match(r"([+-]?[\d.]+(?: ± [\d.]+)?)(?: points)?(?: \(([+-]\d+) %\))?", effect)
            tally.interval("effect", where, match[1].lstrip("+"), c.differences)
            tally.same("label", where, effect[match.end() :].strip() in ("", c.metric, f"{c.metric}, %"), True, 0)
            if match[2]:
                base, mean = interval([c.high[s] for s in c.seeds])[0], interval(c.differences)[0]
                share = 10**mean - 1 if c.metric.startswith("log10 ") else mean / abs(base)
                tally.number("effect in %", where, match[2], 100 * share)
            tally.same("n", where, int(n), len(c.seeds))
            tally.p_value("Holm's p", where, p, c.p_holm)
        runs = {run["name"] for c in compared for run in c.runs}
        if not runs and status != "not tested":
            runs = item_runs(item, items)
        cost = sum(item.study.runs[name]["time_seconds"] for name in runs)
        if row["cost"] != NOTHING or cost:
            tally.seconds("cost", where, row["cost"], cost)


def check_answer(lines, overview, tally):
    """Check the totals, how many comparisons of SAM's test error say what, and the effect told of each condition."""
    counted = [row for row in overview if row["item"].name not in REPEATED]
    papers = [row for row in counted if not row["claim"].endswith(" (ours)")]
    totals = {status: int(n) for n, status in re.findall(r"\*\*(\d+) ([a-z ]+)\*\*", lines[0])}
    counts = Counter(row["status"] for row in papers)
    tally.same("totals", "answer", totals, dict(counts), len(counts))
    unplanned = re.search(r"items without a registered plan: (.*?) \((.*?)\)\.", " ".join(lines))
    without = [row for row in papers if not row["item"].has_plan]
    if unplanned or 0 < len(without) < len(papers):
        told = {status: int(n) for n, status in re.findall(r"(\d+) ([a-z ]+)", unplanned[1])}
        tally.same("totals", "answer", told, dict(Counter(row["status"] for row in without)), len(told))
        names = list(dict.fromkeys(row["item"].name for row in without))
        tally.same("totals", "answer", unplanned[2].split(", "), names, 0)
    said = re.search(r"in (\d+) of the (\d+) comparisons .* higher one in (\d+), .* difference in (\d+)\.", lines[0])
    tests = Counter(row["status"] for row in papers if _of_sam(row))
    lower, higher, neither = (tests[s] for s in ("reproduced", "not reproduced", "inconclusive"))
    expected = [lower, lower + higher + neither, higher, neither]
    tally.same("totals", "answer", [int(n) for n in said.groups()] if said else [0] * 4, expected, 4 * bool(said))
    conditions = {}
    for row in counted:
        if _of_sam(row):
            where = row["claim"].partition(f"{_compared(row).names[0]} has a lower test error than")[0]
            conditions.setdefault((row["item"].name, where), []).append(row)
    best = [found for rows in conditions.values() if (found := _of_the_best(rows))]
    own = {row["item"].name for row in counted if row["status"] in KEPT}
    told = [row for row in counted if row["item"].name in own and row["status"] in (*KEPT, "inconclusive")]
    printed = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    tally.same("totals", "answer", len(printed), len(best) + len(told))
    for line, rows in zip(printed, best, strict=False):
        _sentence(line, rows, tally)
    for line, row in zip(printed[len(best) :], told, strict=False):
        _own_sentence(line, row, tally)


def _of_the_best(rows):
    """Return the claims of the SAM with the lowest error: the paper's before ours."""
    tests = [row for row in rows if row["status"] in TESTS]
    papers = {_compared(row).names[0] for row in tests if not row["claim"].endswith(" (ours)")}

    def rank(row):
        c = _compared(row)
        return c.names[0] not in papers, interval([c.low[s] for s in c.seeds])[0]

    best = min(tests, key=rank, default=None)
    return [row for row in rows if best and _compared(row).names[0] == _compared(best).names[0]]


def _compared(row):
    return row["item"].comparisons[row["index"]][0]


def _of_sam(row):
    return (
        " has a lower test error than " in row["claim"]
        and _compared(row).differences
        and _compared(row).names[0].startswith("SAM")
    )


def _sentence(line, rows, tally):
    """Check the effects of one SAM next to each rival, its passes per step, and what is said of a control."""
    where, method = f"answer: {rows[0]['claim']}", _compared(rows[0]).names[0]
    tests = [row for row in rows if row["status"] in TESTS]
    effects = list(EFFECT.finditer(line))
    tally.same("answer", where, len(effects), len(tests))
    for match, row in zip(effects, tests, strict=False):
        c = _compared(row)
        tally.interval("effect", where, match[2], [(-1 if match[1] == "lowers" else 1) * d for d in c.differences])
        tally.same("answer", where, match[3], c.names[1])
        tally.same("n", where, int(match[4]), len(c.seeds))
        tally.p_value("Holm's p", where, match[5], c.p_holm)
        tally.same("answer", where, bool(match[6]), row["status"] == "inconclusive", 0)
        tally.same("answer", where, bool(match[7]), row["claim"].endswith(" (ours)"), 0)
    cost = re.search(r", at ([\d.]+) passes per step", line)
    spec = next(r["spec"] for r in _compared(rows[0]).runs if r["name"] in _names_of(rows[0], method))
    tally.number("passes", where, cost[1], passes(spec, spec["epochs"]), 6)
    tally.same("answer", where, f": {method} " in line or line.startswith(f"{method} "), True)
    m = method.partition(", m = ")[2]
    control = any(_compared(row).names[1].startswith(f"SGD, m = {m}") for row in rows)
    tally.same("answer", where, "a control for batch norm, was not run" in line, bool(m) and not control)


def _own_sentence(line, row, tally):
    """Check a claim of our own: its verdict, and either n and p or the evidence of a count."""
    where, said = f"answer: {row['claim']}", f"{row['status'].capitalize()}: {row['claim'].removesuffix('.')}"
    tally.same("answer", where, line.startswith(said), True)
    compared = row["item"].comparisons[row["index"]]
    if not compared or not compared[0].differences:
        tally.same("answer", where, row["item"].section.verdicts[row["index"]][1].endswith(line[len(said) :]), True, 0)
        return
    sure = re.search(rf"\(n = (\d+), ({P_VALUE})\)\.$", line)
    tally.same("n", where, int(sure[1]), len(compared[0].seeds))
    tally.p_value("Holm's p", where, sure[2], compared[0].p_holm)


def _names_of(row, method):
    """Return the runs of a method of a comparison, by name."""
    c = _compared(row)
    entry = (
        row["item"].entry(c.condition, method)
        if c.condition
        else next(
            e for e in row["item"].entries if e.row[1:] == [method] and e.runs[0]["name"] in {r["name"] for r in c.runs}
        )
    )
    return {run["name"] for run in entry.runs}


def item_runs(item, items):
    """Return all runs of an item: those its section links, those of its name, and of the tables it sums up."""
    if len(items) == 1:
        return set(item.study.runs)
    runs = set(item.section.runs) | {
        n for n, r in item.study.runs.items() if r["spec"]["name"].startswith(f"{item.name}/")
    }
    if item.name == "inner-steps":  # what SAM gains is the measure of an effect
        runs |= set(without_sam(item))
    if item.name == "error-reduction":
        runs |= {
            n for other in items if re.match(r"Table [1235],", other.section.source) for n in item_runs(other, items)
        }
    return runs
