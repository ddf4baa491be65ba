"""Our study of the suggested radius: its table, figure and verdicts, computed again. Imports nothing of flatmin."""

import re

from recompute.page import interval
from recompute.runs import SIGNIFICANT, factor, optim, paired_p, percent

TABLE = "The suggested radius and the tuned one"
TUNED, SUGGESTED, DEFAULT = "SAM, m = 16", "SAM, m = 16, suggested rho", "SAM, m = 16, rho 0.05"
KEPT, NEAR, MOST = 0.9, (0.5, 2.0), 0.8
"""The share of the tuned gain to keep; where the best factor should be, and in how many conditions."""
GATE, NOISY_GATE = 2.0, 5.0


class Outcome:
    """What one condition of the plan says; ``complete`` is False while one of its runs is missing."""

    def __init__(self, item, condition):
        self.item, self.condition = item, condition
        own = {name.removeprefix(f"{condition}, "): g for name, g in item.planned.items() if name.startswith(condition)}
        self.complete = all(len(group.runs) == group.asked for group in own.values())
        if not self.complete:
            return
        runs = {name: [item.study.runs[run] for run in group.runs] for name, group in own.items()}
        rivals = [name for name in runs if name.startswith("SGD, m = 16")] or [n for n in runs if n.startswith("SGD")]
        self.baseline = min(rivals, key=lambda name: self.mean(runs[name]))
        self.runs, self.tried = runs, runs[f"{TUNED}, choosing"]
        self.e0, self.best, self.at_one = (self.mean(runs[n]) for n in (self.baseline, TUNED, SUGGESTED))
        self.factor = factor(optim(runs[TUNED][0], "rho"))

    @staticmethod
    def mean(runs):
        """Return the mean test error in %."""
        return interval([100 * run["metrics"]["test_error"] for run in runs])[0]

    @property
    def gate(self):
        """Why the condition does not count; nothing if it does."""
        base = self.runs[self.baseline]
        error = interval([100 * run["metrics"]["train_error"] for run in base])[0]
        limit = NOISY_GATE if base[0]["spec"].get("data", {}).get("label_noise") else GATE
        factors = [factor(optim(run, "rho")) for run in self.tried]
        if error > limit:
            return f"{self.baseline} ends with a training error of {error:.1f} %, above {limit:g} %"
        return f"{TUNED}'s rho is at the edge of its grid" if self.factor in (min(factors), max(factors)) else ""

    @property
    def gain_is_significant(self):
        """Whether the tuned radius has a lower error than the baseline, paired by seed."""
        one, two = ({run["seed"]: run["metrics"]["test_error"] for run in self.runs[n]} for n in (TUNED, self.baseline))
        p = paired_p([one[seed] for seed in sorted(one)], [two[seed] for seed in sorted(one)])
        return p < SIGNIFICANT and self.best < self.e0

    @property
    def excess(self):
        """By how much the error at factor 1 is above e0 - 0.9 (e0 - e*), in % of e0."""
        return 100 * (self.at_one - (self.e0 - KEPT * (self.e0 - self.best))) / self.e0


def outcomes(item):
    """Return what each condition of the plan says."""
    names = [name for name in item.planned if name.endswith(f", {TUNED}, choosing")]
    return [Outcome(item, name.removesuffix(f", {TUNED}, choosing")) for name in names]


def counted(item):
    """Return the conditions that are complete, pass their gate and have a gain to keep."""
    return [o for o in outcomes(item) if o.complete and not o.gate and o.best < o.e0]


def check_rule_table(item, block):
    """Check which conditions are there, which runs are in which column, the best factor and the share of the gain."""
    found = [o for o in outcomes(item) if o.complete]
    item.tally.same("runs", block.caption, [row[0] for row in block.rows], [o.condition for o in found])
    for row, o in zip(block.rows, found, strict=True):
        where = f"{item.name}, {o.condition}"
        columns = {"suggested rho": SUGGESTED, "without SAM": o.baseline, "rho 0.05": DEFAULT}
        for column, name in (columns | {"suggested": SUGGESTED, "tuned": TUNED}).items():
            entry = next(e for e in item.entries if e.row[0] == o.condition and e.column == column)
            mine = sorted(run["name"] for run in o.runs[name])
            item.tally.same("runs", f"{where}, {column}", sorted(run["name"] for run in entry.runs), mine)
            if column == "without SAM":
                item.tally.same("choice of the baseline", where, entry.notes, [o.baseline])
        item.tally.number("choice", where, row[2], o.factor, 6)
        share = f"{100 * (o.e0 - o.at_one) / (o.e0 - o.best):.0f} %" if o.gain_is_significant else ""
        item.tally.same("share of the tuned gain", where, row[-1], share)


def check_rule_verdict(item, claim, evidence, compared, where):
    """Return the status of one of the two claims, and what is left of its sentence."""
    every, gained = outcomes(item), counted(item)
    counts = [o for o in every if o.complete and not o.gate]
    complete = sum(o.complete for o in every)
    near = sum(NEAR[0] <= o.factor <= NEAR[1] for o in counts)
    if match := re.match(r"(\d+) of (\d+) conditions are complete, and (\d+) of them pass their gate", evidence):
        said, expected = [int(n) for n in match.groups()], [complete, len(every), len(counts)]
        item.tally.same("counts", where, said, expected, 3)
    if complete < len(every) or len(gained) < 2:
        return "not tested", evidence.replace(match[0], "")
    if claim.startswith("The best factor"):
        said = re.search(r"the factor is in \[1/2, 2\] in (\d+)\.", evidence)
        item.tally.same("counts", where, int(said[1]), near)
        return "kept" if near >= MOST * len(counts) else "not kept", ""
    mean, half_width = interval(compared[0].differences)
    lost = "not kept" if mean - half_width > 0 else "inconclusive"
    return "kept" if compared[0].status == "reproduced" else lost, None


def rule_points(item, runs):
    """Yield the test error above the lowest of a condition's grid, in units of its tuned gain, by factor."""
    shown = {run["name"] for run in runs}
    for o in (o for o in outcomes(item) if o.complete and o.e0 > o.best):
        errors = {factor(optim(run, "rho")): percent("test_error")(run) for run in o.tried if run["name"] in shown}
        for f, error in errors.items():
            yield (o.condition, round(f, 9)), [(error - min(errors.values())) / (o.e0 - o.best)]
