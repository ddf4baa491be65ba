"""One item of a page: its tables, comparisons and choices, computed again. Imports nothing of flatmin."""

import math
import re
import statistics

from recompute import rule
from recompute.comparisons import (
    AGAINST,
    CLAIM,
    COMPARED,
    MEASURED,
    METRICS,
    NO_PAIR,
    OVER_PAIRS,
    PARTIAL,
    PLANNED,
    UNTESTABLE,
    Comparison,
    Entry,
)
from recompute.page import NOTHING, NUMBER, RUN
from recompute.runs import (
    AT_LOSS,
    TUNING_SEED,
    at_loss,
    best_epoch,
    factor,
    gains,
    holm,
    key,
    misnamed,
    optim,
    passes,
    percent,
    quantity,
)
from recompute.settings import setting_text

CHECKED_LATER = ("", "method", "condition", "model", "augmentation", "dataset", "problem", "in code", "perturbation")
CHECKED_LATER += ("training", "training loss", "noise", "m", "rho", "ascent steps", "noisy labels", "setting", "passes")
CHECKED_LATER += ("learning rate", "best factor", "share of the tuned gain that the suggestion keeps")
CHECKED_LATER += ("share of SAM's gain", "Kendall's tau", "Kendall's tau, adjusted", "score", "score, adjusted")
"""Columns of labels, which runs are compared with, and of numbers that are computed of others."""
TABLES_CHECKED_LATER = ("The bound on the error", "The condition: what Gaussian noise adds", "How model, learning rate")
AUGMENTED = {"none": "without augmentation", "basic": "basic augmentation"}
EDGE = "rho at the edge of its grid"
BY_M = " by micro-batches of m: "
"""In the captions of tables of SGD and SAM by m."""
KEPT = 0.9
"""The share of SAM's gain that a cheap method has to keep."""


def _reader(metric, method):
    """Return how to read a metric of a method's runs: at the end, or at the best epoch where training stops early."""
    read = (lambda run: run["metrics"]["test_loss"]) if metric == "test loss" else percent(METRICS[metric])
    return read if "stopped early" not in method else lambda run: read({"metrics": best_epoch(run)})


class Item:
    """One item of a page with its numbers."""

    def __init__(self, study, tally, section):
        self.study, self.tally, self.section, self.name = study, tally, section, section.item
        self.entries: list[Entry] = []
        self.relative: list[tuple] = []
        self.choices: dict[tuple[str, str], list[tuple[str, dict | None, bool]]] = {}
        self.comparisons: list[list[Comparison]] = []
        self.has_plan = self.name in self.study.plan["items"]
        self.planned = self.study.planned(self.name)
        self.says_missing = bool(re.search(r"\*\*\d+ runs? of this item", " ".join(section.lines)))

    # --- tables ---

    def read_tables(self):
        """Check the values of all replicas, means, intervals and numbers of runs; keep the entries for comparisons."""
        for block in self.section.blocks:
            if block.is_figure or not block.rows or block.caption.startswith("Hyperparameters"):
                continue
            traced = iter(block.traced)
            for row in block.rows:
                labels = []
                for title, cell in zip(block.header, row, strict=True):
                    where = f"{self.name}, {block.caption}, {', '.join([*labels, title])}"
                    if title.endswith(", paper"):
                        self.tally.papers += len(NUMBER.findall(cell))
                    elif match := MEASURED.fullmatch(cell):
                        label, text = next(traced)
                        self._measured(block, labels, title.removesuffix(", measured"), match, label, text, where)
                    elif COMPARED.fullmatch(cell):
                        next(traced)  # checked when all p-values are known
                    elif cell not in ("", NOTHING, f"{NOTHING} (cited)"):
                        labels.append(cell)
                        if title not in CHECKED_LATER and not block.caption.startswith(TABLES_CHECKED_LATER):
                            self.tally.skip(where, cell, "a cell of a table")

    def _measured(self, block, labels, column, match, label, text, where):
        names = RUN.findall(text)
        self.tally.same("label", where, label, ", ".join([*labels, column]), 0)
        runs = [self.study.runs[name] for name in names]
        methods = 2 if column in ("method - SAM", "SAM - SGD") else 1
        self.tally.same("n", where, int(match[2]), len(set(names)) // methods)
        read = quantity(f"{block.caption} | {', '.join(labels)} | {column}")
        if read is None:
            self.tally.not_checked.append(("a quantity that this script does not know", where, 2 + len(names)))
            return
        if column == "method - SAM":
            self.relative.append((block.caption, labels[0], match[1], text, where))  # SAM's row comes later
            return
        if column == "SAM - SGD":
            self._gain(block, labels, match, text, read, where)
            return
        values = [read(run) for run in runs]
        entry = Entry(block.caption, list(labels), column, label, runs, [n for n in (match[3] or "").split("; ") if n])
        self._belong(entry, block.header[0], where)
        self.entries.append(entry)
        for one, value in zip(re.findall(r"(\S+) from ", text), values, strict=True):
            self.tally.number("value of a replica", where, one, value, None if "." in one else 4)
        self.tally.interval("mean", where, match[1], values)
        for note in entry.notes:
            if spread := re.fullmatch(r"standard deviation ([\d.]+)", note):
                self.tally.number("standard deviation", where, spread[1], statistics.stdev(values), 2)
            elif available := re.fullmatch(r"(\d+) of (\d+) replicas of .* are available", note):
                self.tally.same("n", where, int(available[1]), len(runs))
            elif note != EDGE and block.caption != rule.TABLE:  # where it is the baseline's name
                self.tally.skip(where, note, "a note")

    def _gain(self, block, labels, match, text, read, where):
        """Check the difference between SAM and SGD by the same micro-batches, seed by seed."""
        found = self.change(block.caption, labels[0], read)
        self.tally.interval("difference", where, match[1], list(found.values()))
        values = text.partition(";")[0]
        for one, value in zip(values.removesuffix(" %").split(", "), found.values(), strict=True):
            self.tally.number("value of a pair", where, one, value, None if values.endswith(" %") else 4)

    def change(self, caption, row, read):
        """Return SAM minus SGD by seed, in a row of a table by m."""
        sgd, sam = (
            next(e for e in self.entries if (e.caption, e.row[0], e.column) == (caption, row, name)).values(read)
            for name in ("SGD", "SAM")
        )
        return {seed: sam[seed] - sgd[seed] for seed in sorted(sgd.keys() & sam.keys())}

    def _belong(self, entry, first, where):
        """Check that a number has all stored replicas of one setting, and that the setting is what its label says."""
        specs = {key(run["spec"]) for run in entry.runs}
        stored = self.study.replicas(entry.runs[0]["spec"])
        if TUNING_SEED not in {run["seed"] for run in entry.runs}:
            stored = {seed: name for seed, name in stored.items() if seed != TUNING_SEED}
        if entry.caption in AT_LOSS:  # a run that never falls below a loss has no number there
            stored = {s: n for s, n in stored.items() if at_loss(self.study.runs[n], float(entry.row[1])) is not None}
        self.tally.same("runs", where, sorted(run["name"] for run in entry.runs), sorted(stored.values()))
        self.tally.same("runs", where, len(specs), 1)
        label = f"{entry.label}, {entry.caption}" if " labels" in entry.caption else entry.label
        self.tally.same("runs", where, misnamed(label, entry.runs[0]), [])
        if first == "rho" or "ascent steps" in first:
            setting = optim(entry.runs[0], "rho", 0.0) if first == "rho" else optim(entry.runs[0], "ascent_steps", 1)
            self.tally.number("runs", where, entry.row[0], float(setting), 6)
        if self.has_plan and (group := entry.label.replace(": ", ", ")) in self.planned:
            self.tally.same("runs", where, sorted(r["name"] for r in entry.runs), sorted(self.planned[group].runs))

    def check_edges(self):
        """Check that a number says so if its rho, of several, is the smallest or the largest."""
        chosen = {label for c, m in self.choices for label in (f"{c}: {m}", f"{m}, {c}")}
        for e in self.entries:
            block = self.section.block(e.caption)
            of_grid = e.column == "test error" and {"rho", "validation error"} <= set(block.header)
            of_arms = e.column == "test error" and "share of SAM's gain" in block.header
            complete = not any("available" in note or "failed" in note for note in e.notes)
            if complete and (e.label in chosen or of_grid or of_arms):
                at_edge = bool(optim(e.runs[0], "rho")) and self.at_edge(e.runs[0])
                self.tally.same("choice", f"{self.name}, {e.label}", EDGE in e.notes, at_edge)

    def at_edge(self, run):
        """Return whether a run's rho is the smallest or the largest of several that were tried."""
        tried = [factor(optim(c, "rho")) for c in self.study.candidates(run["spec"]) if optim(c, "rho") is not None]
        if not tried:  # rho was chosen by the replicas' own validation errors
            tried = [factor(optim(c, "rho")) for c in self.study.grid(run)]
        return len(set(tried)) > 1 and factor(optim(run, "rho")) in (min(tried), max(tried))

    def check_comparisons(self):
        """Check all entries of tables that compare two methods."""
        for block in self.section.blocks:
            cells = [(row, match) for row in block.rows for cell in row if (match := COMPARED.fullmatch(cell))]
            traced = [(label, text) for label, text in block.traced if " from " not in text]
            if BY_M in block.caption:  # where it is not a comparison
                traced = [(label, text) for label, text in traced if not label.endswith(", SAM - SGD")]
            if "method - SAM" in block.header or not cells:
                continue
            for (row, match), (label, text) in zip(cells, traced, strict=True):
                self.tally.same("label", block.caption, label.startswith(row[0]), True, 0)
                where = f"{self.name}, {block.caption}, {row[0]}, {match[2]} - {match[3]}"
                self._check_comparison(self._find(block, row, match), match, text, where)
            if said := re.search(r"Holm's correction is for all (\d+) comparisons", " ".join(block.lines)):
                family = self._find(block, *cells[0]).family
                self.tally.same("size of a family", f"{self.name}, {block.caption}", int(said[1]), family)

    def _find(self, block, row, match):
        """Return the comparison of a table's entry: the one of a verdict, or of two entries of its row."""
        names = match[2], match[3]
        known = [c for group in self.comparisons for c in group if c.names == names]
        if block.header[0] == "augmentation" and row[0] in AUGMENTED:
            what = f"log10 of lambda_max at a training loss of {row[1]}" if block.caption in AT_LOSS else row[1]
            return next(c for c in known if c.metric == f"{what}, {AUGMENTED[row[0]]}")
        if block.caption.startswith("Comparisons: "):
            metric = next(m for m in METRICS if m in block.caption)
            return next(c for c in known if (c.condition, c.metric) == (row[0], metric))
        if BY_M in block.caption:
            what = block.caption.partition(BY_M)[2].partition(" (")[0]
            return next(c for c in known if c.metric == f"SAM's change of the {what}")
        if found := [c for c in known if c.metric == "test error" or c.metric.startswith(row[0])]:
            return found[0]
        one, two = (next(e for e in self.entries if e.row == [row[0]] and e.column == name) for name in names)
        read = quantity(f"{block.caption} | {row[0]} | {match[2]}")
        alone = Comparison(names, one.values(read), two.values(read), [*one.runs, *two.runs])
        alone.p_holm = alone.p
        return alone

    def _check_comparison(self, found, match, text, where):
        self.tally.interval("difference", where, match[1].removeprefix("+"), found.differences)
        self.tally.same("n", where, int(match[4]), len(found.seeds))
        self.tally.p_value("p", where, match[5], found.p)
        self.tally.p_value("Holm's p", where, match[6], found.p_holm)
        values, runs = text.split("; ")[0].removesuffix(" points").split(", "), RUN.findall(text)
        for one, value in zip(values, found.differences, strict=True):
            self.tally.number("value of a pair", where, one, value, None if " points;" in text else 4)
        self.tally.same("runs", where, sorted(runs), sorted(run["name"] for run in found.runs))

    def check_choices(self):
        """Check validation errors, what was chosen, and how many were tried."""
        for block in self.section.blocks:
            if not block.caption.startswith("What was chosen on the validation split"):
                continue
            traced = {label.removesuffix(", validation error"): RUN.findall(text)[0] for label, text in block.traced}
            for condition, method, setting, rho, _, mark in block.rows:
                label = ", ".join(filter(None, (condition, method, setting, rho)))
                run = self.study.runs.get(traced.get(label, ""))
                self.choices.setdefault((condition, method), []).append((setting, run, mark == "chosen"))
                if run is not None:
                    where = f"{self.name}, chosen: {condition}, {method}"
                    self.tally.same("setting", where, setting, setting_text(run), len(NUMBER.findall(setting)))
                    self.tally.same("runs", where, misnamed(f"{condition}: {method}", run), [])
                    if rho or run["metrics"].get("rho") is not None:
                        self.tally.number("rho", where, rho, run["metrics"]["rho"], 3)
            for (condition, method), tried in self.choices.items():
                where = f"{self.name}, chosen: {condition}, {method}"
                errors = [math.nan if run is None else run["metrics"]["valid_error"] for _, run, _ in tried]
                best = None if any(map(math.isnan, errors)) else tried[errors.index(min(errors))][0]
                marked = [setting for setting, _, mark in tried if mark]
                self.tally.same("choice", where, marked, [] if best is None else [best])
                if group := self.planned.get(f"{condition}, {method}, choosing"):
                    expected = [setting_text({"spec": spec}) for spec in group.tried]
                    self.tally.same("setting", where, [setting for setting, _, _ in tried], expected)
                first = next(run for _, run, _ in tried if run is not None)
                own = {"rho"} if optim(first, "rho") else {"lr", "weight_decay"}
                if not first["spec"]["data"].get("mixup"):
                    stored = [
                        r["name"] for r in self.study.candidates(first["spec"], *own) if self._same_kind(r, first)
                    ]
                    self.tally.same("runs", where, sorted(r["name"] for _, r, _ in tried if r), sorted(stored))

    @staticmethod
    def _same_kind(one, two):
        return bool(optim(one, "rho")) == bool(optim(two, "rho")) and one["spec"]["data"] == two["spec"]["data"]

    # --- verdicts ---

    def read_comparisons(self, claims):
        """Find the two samples of every comparison that the verdicts name."""
        for claim, (_, text) in zip(claims, self.section.verdicts, strict=True):
            self.comparisons.append(list(self._of_verdict(claim, text[len(claim) :].strip())))

    def correct(self):
        """Correct all p-values together; a comparison that is missing or no test counts as not rejected."""
        for ours in (False, True):
            family = [c for group in self.comparisons for c in group if c.ours == ours]
            planned = len(family)
            if self.has_plan and self.name != "rho-rule":  # whose second claim is a count, not a test
                texts = self.study.plan["items"][self.name]["comparisons"]
                planned = sum(text.endswith(" (ours)") == ours for text in texts)
            missing = planned - len(family)
            p_values = [math.nan if c.gated else c.p for c in family]
            waits = [len(c.seeds) < max(2, c.asked) and not c.untestable for c in family]
            waiting = missing + sum(waits)
            at_best = holm([0.0 if w else p for w, p in zip(waits, p_values, strict=True)] + [0.0] * missing)
            for c, adjusted, best in zip(family, holm(p_values, missing), at_best, strict=False):
                c.p_holm, c.p_best, c.family, c.waiting = adjusted, best, planned, waiting

    def _of_verdict(self, claim, evidence):
        if match := OVER_PAIRS.search(evidence):
            condition, a, metric, b, ours = CLAIM.fullmatch(claim).groups()
            one, two = self.entry(condition, a), self.entry(condition, b)
            low, high = (e.values(_reader(metric, name)) for e, name in ((one, a), (two, b)))
            yield Comparison((a, b), low, high, [*one.runs, *two.runs], condition, metric, ours=bool(ours))
        elif match := re.fullmatch(r"With (.+?), (.+) has a lower test error than (.+)\.", claim):
            labels = "40%" if "40 %" in match[1] else "0%"
            one, two = (
                next(e for e in self.entries if e.row == [labels, name] and e.column == "test error")
                for name in match.groups()[1:]
            )
            low, high = (e.values(_reader("test error", name)) for e, name in ((one, match[2]), (two, match[3])))
            yield Comparison((match[2], match[3]), low, high, [*one.runs, *two.runs])
        elif evidence.startswith("Not yet: "):
            condition, a, metric, b, ours = CLAIM.fullmatch(claim).groups()
            yield Comparison((a, b), condition=condition, metric=metric)
        else:
            evidence = re.sub(
                r"^Not a test of the claim at this scale: .*?\. (?=test error|SAM's change)", "", evidence
            )
            ours, said = claim.endswith(" (ours)"), evidence[evidence.find("SAM's change of the ") :]
            for match in AGAINST.finditer(said if "SAM's change of the " in evidence else evidence):
                yield self._samples(claim, match[1].strip(), match[3], match[5])
            for match in PARTIAL.finditer(evidence):
                found = self._samples(claim, match[1].strip(), match[3], match[5])
                found.asked = int(match[7])
                yield found
            for match in UNTESTABLE.finditer(evidence):
                yield Comparison(("", ""), metric=match[1].strip(), untestable=match[2])
            for match in NO_PAIR.finditer(evidence):
                yield Comparison((match[2], match[3]), metric=match[1].strip(), ours=ours)

    def entry(self, condition, method):
        """Return the runs of a method in a condition: methods may be in columns or in rows."""
        labels = (f"{condition}: {method}", f"{method}, {condition}")
        return next(e for e in self.entries if e.label in labels)

    def arm(self, condition, name, column="test error"):
        """Return the runs of an arm of our own study, whose conditions are tables."""
        return next(e for e in self.entries if (e.caption, e.row[0], e.column) == (condition, name, column))

    def _samples(self, claim, what, a, b):
        """Return a comparison that a sentence describes: "what: 1.2 (a) vs. 3.4 (b)"."""
        if what.startswith("error above the limit"):
            found = rule.counted(self)
            runs = [r for o in found for name in (o.baseline, rule.TUNED, rule.SUGGESTED) for r in o.runs[name]]
            low = {n: o.excess for n, o in enumerate(found)}
            return Comparison((a, b), low, dict.fromkeys(low, 0.0), runs, metric=what, one_sided=True)
        if " keeps at least " in claim:
            condition = next(
                c for c in sorted({e.caption for e in self.entries}, key=len) if claim.startswith(f"{c}: ")
            )
            limited = f"SGD's error less {KEPT:.0%} of the gain of {self.reference(condition)}"
            self.tally.same("label", claim, b, limited, 0)
            arms = [self.arm(condition, name) for name in ("SGD", self.reference(condition), a)]
            plain, sam, own = map(self.errors, arms)
            limit = {seed: (1 - KEPT) * plain[seed] + KEPT * sam[seed] for seed in plain.keys() & sam.keys()}
            return Comparison((a, b), own, limit, [r for arm in arms for r in arm.runs], condition, one_sided=True)
        if match := re.fullmatch(r"what (\d+) steps find more than (\d+) step, ([\w-]+), points of error", what):
            many, few = (self._rows(steps, match[3], "test error")[0] for steps in match.groups()[:2])
            samples = [gains(few.runs, many.runs, name) for name in (a, b)]
            return Comparison((a, b), *samples, metric=what)
        if match := re.fullmatch(r"SAM's change of the (.+)", what):
            caption = f"SGD and SAM{BY_M}{match[1]}"
            read, ours = quantity(f" |  | {match[1]}"), claim.endswith(" (ours)")
            rows = [e for e in self.entries if e.caption.startswith(caption) and e.row[0] in (a, b)]
            samples = [self.change(rows[0].caption, name, read) for name in (a, b)]
            return Comparison((a, b), *samples, [r for e in rows for r in e.runs], metric=what, ours=ours)
        if what.startswith("error reduction over "):
            by_seed = self.reductions_by_seed(re.search(r" conditions with (.+), % of", what)[1])
            return Comparison((a, b), dict.fromkeys(by_seed, 0.0), by_seed, metric=what)
        if match := re.fullmatch(r"test error of (.+) with (\w+), %", what):
            found = [self.entry(f"{match[1]}, {name}", match[2]) for name in (a, b)]
            reads = [percent("test_error")] * 2
        elif match := re.fullmatch(r"(test error|estimated sharpness)(?: at the end)?, ([\w-]+), (?:%|points)", what):
            found = [self._rows(name.split()[0], match[2], match[1])[0] for name in (a, b)]
            reads = [quantity(f" |  | {e.column}") for e in found]
        elif match := re.fullmatch(r"cosine, (\w+ order) training", what):
            found = [self._rows(match[1], f"cosine, {name}")[0] for name in (a, b)]
            reads = [quantity(f" |  | {e.column}") for e in found]
        elif match := re.fullmatch(r"log10 of lambda_max at a training loss of ([\d.]+), (.+)", what):
            rows = [e for e in self.entries if e.caption == AT_LOSS[0] and AUGMENTED[e.row[0]] == match[2]]
            found = [next(e for e in rows if (e.row[1], e.column) == (match[1], name)) for name in (a, b)]
            reads = [lambda run: math.log10(at_loss(run, float(match[1]))["lambda_max"])] * 2
        elif match := re.fullmatch(r"(lambda_max(?:/lambda_5)? at the end), (.+)", what):
            rows = [e for e in self.entries if e.row[1:] == [match[1]] and AUGMENTED[e.row[0]] == match[2]]
            found = [next(e for e in rows if e.column == name) for name in (a, b)]
            reads = [quantity(f" | {match[1]} | ")] * 2
        elif match := re.fullmatch(r"validation error, (\d+ % noise), %", what):
            rhos = ["0" if name == "without SAM" else name.removeprefix("rho = ") for name in (a, b)]
            found = [next(e for e in self.entries if (e.row, e.column) == ([rho], match[1])) for rho in rhos]
            reads = [percent("valid_error")] * 2
        elif what == "test error, %":
            found = [self._rows(name, "test error")[0] for name in (a, b)]
            reads = [percent("test_error")] * 2
        else:
            found = [next(e for e in self.entries if what.startswith(e.row[0]) and e.column == n) for n in (a, b)]
            reads = [quantity(f"{found[0].caption} | {found[0].row[0]} | {found[0].column}")] * 2
        runs = [] if what.startswith("cosine") else [run for e in found for run in e.runs]
        low, high = (e.values(read) for e, read in zip(found, reads, strict=True))
        return Comparison((a, b), low, high, runs, metric="test error" if what == "test error, %" else what)

    def _rows(self, row, *column):
        return [e for e in self.entries if e.row and e.row[0] == row and e.column == ", ".join(column)]

    def reference(self, condition):
        """Return the arm of our own study whose gain counts: SAM with one eps, or with m where that is not an arm."""
        names = {row[0] for block in self.section.blocks if block.caption == condition for row in block.rows}
        return "SAM" if "SAM" in names else "SAM, m = 16"

    @staticmethod
    def errors(entry):
        """Return the test errors of an arm by seed; where training stops early, those of the best epoch."""
        return entry.values(quantity(f"{entry.caption} | {entry.row[0]} | test error"))

    def arms(self, condition):
        """Return cost, mean error, name and errors of each arm of our own study in a condition."""
        found = []
        for e in self.entries:
            if e.caption == condition and e.column == "test error" and not e.is_incomplete:
                errors = list(self.errors(e).values())
                found.append((self.passes(condition, e.row[0]), sum(errors) / len(errors), e.row[0], errors))
        return found

    def passes(self, condition, name):
        """Return what an arm costs, in passes over the training set relative to SGD; up to where it stops."""
        runs = self.arm(condition, name).runs
        plain = {e.row[0]: e.runs[0]["spec"]["epochs"] for e in self.entries if e.caption == condition}
        doubled = next(epochs / 2 for arm, epochs in plain.items() if "twice the epochs" in arm)
        base = plain.get("SGD", doubled)
        if "stopped early" in name:
            return sum(best_epoch(run)["epoch"] for run in runs) / len(runs) / base
        return passes(runs[0]["spec"], base)

    def num_weights(self):
        """Return the number of weights of the item's model, which the bound's runs have measured."""
        model = self.entries[0].runs[0]["spec"]["model"]["name"]
        found = (
            f
            for r in self.study.runs.values()
            if r["spec"]["model"]["name"] == model
            for f in r.get("measured", {}).values()
        )
        return next(f["num_weights"] for f in found if "num_weights" in f)

    def error_comparisons(self, method):
        """Return a method's first comparison of test errors by condition; None while runs are missing."""
        found = {}
        if self.has_plan:
            for text in self.study.plan["items"][self.name]["comparisons"]:
                if match := PLANNED.fullmatch(text):
                    condition, metric, a, _, ours = match.groups()
                    if a == method and metric == "test error" and not ours:
                        found.setdefault(condition, None)
        for group in self.comparisons:
            for c in group:
                about = c.names[0] == method and c.metric == "test error" and c.condition and not c.ours
                if about and found.get(c.condition) is None:
                    found[c.condition] = c if c.differences else None
        return found

    def reductions_by_seed(self, method):
        """Return SAM's error reduction in %, by seed, in the mean over the conditions that count."""
        asked = self.reductions(method)
        if None in asked.values():
            return {}
        seeds = set.intersection(*(set(c.seeds) for c in asked.values()))
        return {s: sum(100 * (1 - c.low[s] / c.high[s]) for c in asked.values()) / len(asked) for s in sorted(seeds)}
