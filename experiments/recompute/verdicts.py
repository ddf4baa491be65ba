"""The verdicts of an item: status, gate, and every number of their sentences. Imports nothing of flatmin."""

import math
import re

from recompute.comparisons import AGAINST, CLAIM, NO_PAIR, OVER_PAIRS, P_VALUE, PARTIAL, UNTESTABLE, why_untestable
from recompute.figures import reductions
from recompute.page import interval
from recompute.rule import check_rule_verdict
from recompute.runs import SIGNIFICANT, factor, facts, holm, optim, sign_test, without_sam
from recompute.zoo import check_verdict
from scipy import stats

GATE, NOISY_GATE = 2.0, 5.0
"""The largest training error, in %, with which a baseline counts; the second with noisy labels, as given."""
STRONG, NEARLY, CLOSE_TO_ONE, NO_FALL = 0.5, 0.8, 0.9, 0.001
"""An error that changes by less is not strongly affected; the share that one step must find; a cosine close to 1; a
fall of the error that counts as none."""


def check_verdicts(item, items, claims):
    """Check the status of each verdict, and the numbers of its sentences."""
    for claim, (status, text), compared in zip(claims, item.section.verdicts, item.comparisons, strict=True):
        where = f"{item.name}, verdict: {claim}"
        evidence = text[len(claim) :].strip()
        expected, rest = _expected(item, items, claim, evidence, compared, where)
        item.tally.same("verdict", where, status, expected)
        item.tally.skip(where, rest, "a sentence of a verdict")


def _expected(item, items, claim, evidence, compared, where):
    """Return the status by the rules, and what is left of the evidence when its numbers are checked."""
    if item.name == "rho-rule":
        status, rest = check_rule_verdict(item, claim, evidence, compared, where)
        return status, _sentences(item, evidence, compared, where) if rest is None else rest
    if OVER_PAIRS.search(evidence):
        return _one_comparison(item, evidence, compared[0], where)
    if evidence.startswith("Not yet: "):
        return "not tested", _not_yet(item, claim, evidence, where)
    if "paired t-test over" in evidence:
        return _in_words(item, evidence, compared[0], where)
    if "bounds are vacuous" in evidence:
        return _bounds(item, evidence, where)
    if "noise lowers the test error" in evidence:
        return _noise(item, evidence, where)
    if re.search(r"score [\d.]+ for m = \d+ and", evidence):
        return check_verdict(item, claim, evidence, where), ""
    if match := re.match(r"(\d+) models of the zoo are missing", evidence):
        absent = sum(group.asked - len(group.runs) for group in item.planned.values())
        item.tally.same("missing runs", where, int(match[1]), absent if item.has_plan else int(match[1]))
        return "not tested", ""
    if "SAM's change of the " in evidence and compared[0].seeds:
        return _change(item, evidence, compared[0], where)
    if not compared:
        return "not tested", evidence
    for c in compared:
        if c.untestable or len(c.seeds) >= c.asked:
            why = why_untestable(item, c.metric)
            item.tally.same("gate", where, c.untestable, why, len(re.findall(r"\d+", why)))
        if "the best other rho" in claim and len(c.seeds) >= c.asked:
            _best_other_rho(item, c, where)
    why = re.match(r"Not a test of the claim at this scale: (.*?)\. (?=test error)", evidence)
    said, evidence = (why[1].split("; "), evidence[why.end() :]) if why else ([], evidence)
    expected = list(dict.fromkeys(note for c in compared for note in gates(item, c)))
    item.tally.same("gate", where, said, expected, len(expected))
    status, rest = judged(compared), _sentences(item, evidence, compared, where)
    if " keeps at least " in claim:
        return _kept(item, claim, status, compared[0], rest, where)
    if match := re.search(r"changes by less than ([\d.]+) points; more than ([\d.]+) would be a strong effect", rest):
        changes, margin = [interval(c.differences) for c in compared], STRONG * _gain(item, compared[0])
        widest = max(abs(mean) + half_width for mean, half_width in changes)
        for printed, value in zip(match.groups(), (widest, margin), strict=True):
            item.tally.number("limit of an effect", where, printed, value, 2)
        beyond = any(
            c.p_holm < SIGNIFICANT and abs(d) - w > margin for c, (d, w) in zip(compared, changes, strict=True)
        )
        status = "reproduced" if widest <= margin else "not reproduced" if beyond else "inconclusive"
        return status, rest.replace(match[0], "").replace("95 %", "")
    if "error reduction over" in evidence:
        return _sign_tests(item, items, status, rest, where)
    if claim.startswith("The cosine") and any(interval(list(c.high.values()))[0] < CLOSE_TO_ONE for c in compared):
        status = status if status == "not tested" else "not reproduced"
    if match := re.search(r"one step finds less than 80 % of what \d+ find: (\d+) %", rest):
        status, rest = "not reproduced", rest  # the share is not printed otherwise
    return status, rest


def _norm(entry):
    """Return whether a number is of a kind of perturbation, whose rho one of several was chosen."""
    return entry.caption.startswith("Test error at the rho") and entry.column == "test error" and entry.row[0] != "SGD"


def judged(compared):
    """Return the status of a claim that consists of several comparisons, all of which must hold."""
    parts = [c.status for c in compared]
    for decisive in ("not reproduced", "not tested", "not tested at this scale"):
        if decisive in parts:
            return decisive
    return "reproduced" if all(part == "reproduced" for part in parts) else "inconclusive"


def gates(item, compared):
    """Return why a comparison is no test at this scale, in the page's words; nothing if it is one."""
    if not compared.differences:
        return []
    if item.name == "p-norm":
        edges = [e.row[0] for e in item.entries if _norm(e) and item.at_edge(e.runs[0])]
        return [f"{name}'s rho is at the edge of its grid" for name in edges]
    if compared.metric.startswith("SAM's change of the "):
        return _gates_of_change(item, compared)
    if match := re.fullmatch(r"test error of (.+) with \w+, %", compared.metric):
        columns = sorted(compared.names, key=lambda name: int(name.split()[0]))
        found = [(column, item.entry(f"{match[1]}, {column}", "SGD").runs) for column in columns]
        errors = [(name, 100 * sum(run["metrics"]["train_error"] for run in runs) / len(runs)) for name, runs in found]
        return [
            f"{name}: SGD ends with a training error of {error:.1f} %, above {GATE:g} %"
            for name, error in errors
            if error > GATE
        ]
    if compared.one_sided:
        return _gates_of_arms(item, compared) if compared.condition else []
    return _gates_of_table(item, compared) if compared.condition else []


def _gates_of_table(item, compared):
    """Return why a table's comparison is no test: the training error of its baseline, and grids."""
    a, b = (item.entry(compared.condition, name) for name in compared.names)
    found = []
    data = b.runs[0]["spec"]["data"]
    error = 100 * sum(run["metrics"]["train_error"] for run in b.runs) / len(b.runs)
    most = NOISY_GATE if data.get("label_noise") else GATE
    if not data.get("mixup") and error > most:  # Mixup's training error is one on mixed images
        found.append(("unfit", error, most))
    for name, entry in ((compared.names[1], b), (compared.names[0], a)):
        if edge := _edge(item, compared.condition, name, entry.runs[0]):
            found.append(("edge", name, edge))
    return found


def _edge(item, condition, method, run):
    """Return the setting of a method's choice that is at the edge of a grid of more than two values."""
    tried = [r for _, r, _ in item.choices.get((condition, method), []) if r is not None]
    for name, words in (("rho", "rho"), ("lr", "learning rate"), ("weight_decay", "weight decay")):
        defaults = {"rho": 0.0, "lr": 0.1, "weight_decay": 5e-4}
        values = {factor(optim(r, name, defaults[name])) for r in tried}
        if len(values) > 2 and factor(optim(run, name, defaults[name])) in (min(values), max(values)):
            return words
    return None


def _one_comparison(item, evidence, compared, where):
    match = OVER_PAIRS.search(evidence)
    mean, half_width = interval(compared.differences)
    item.tally.number("difference", where, match[1], mean)
    item.tally.number("difference, half-width", where, match[2], half_width)
    item.tally.same("n", where, int(match[3]), len(compared.seeds))
    item.tally.p_value("Holm's p", where, match[4], compared.p_holm)
    item.tally.same("size of a family", where, int(match[5] or 1), 1 if compared.gated else compared.family)
    item.tally.same("size of a family", where, int(match[6] or 0), compared.waiting if compared.is_open else 0, 0)
    _better_baseline(item, compared, where)
    closed, rest = _gates_of_table(item, compared), evidence.replace(match[0], "")
    for number, limit in re.findall(r"ends with a training error of ([\d.]+) %, above ([\d.]+) %", rest):
        error, most = next(((g[1], g[2]) for g in closed if g[0] == "unfit"), (math.nan, math.nan))
        item.tally.number("gate", where, number, error)
        item.tally.number("gate", where, limit, most)
    edges = re.findall(r"(?:: |; )([^;:]+)'s ([\w ]+) is at the edge of its grid", rest)
    item.tally.same("gate", where, edges, [(name, words) for kind, name, words in closed if kind == "edge"])
    rest = re.sub(r"Not a test of the claim at this scale: .*? grid\. |Not a test .*? above [\d.]+ %\. ", "", rest)
    return compared.status, rest


def _better_baseline(item, compared, where):
    """Check that of SGD and SGD with twice the epochs the one with the lower mean was taken."""
    base = compared.names[1].removesuffix(", twice the epochs")
    names, condition = (base, f"{base}, twice the epochs"), compared.condition
    rivals = [
        e for e in item.entries if e.label in {x for n in names for x in (f"{condition}: {n}", f"{n}, {condition}")}
    ]
    metric = {"test loss": "test_loss", "calibration error": "test_ece"}.get(compared.metric, "test_error")
    means = {e.label: sum(r["metrics"][metric] for r in e.runs) / len(e.runs) for e in rivals}
    taken = item.entry(compared.condition, compared.names[1]).label
    item.tally.same("choice of the baseline", where, taken, min(means, key=means.__getitem__))


def _not_yet(item, claim, evidence, where):
    if not item.has_plan:
        return evidence
    condition = CLAIM.fullmatch(claim)[1]
    for here, asked, method in re.findall(r"(\d+) of (\d+) replicas of (.+?) are available", evidence):
        group = item.planned[f"{condition}, {method}"]
        item.tally.same("missing runs", where, (int(here), int(asked)), (len(group.runs), group.asked), 2)
    for method in re.findall(r"no setting of (.+?) is chosen yet", evidence):
        item.tally.same("choice", where, item.planned[f"{condition}, {method}"].chosen, None)
    return re.sub(r"\d+ of \d+ replicas of .+? are available|no setting of .+? is chosen yet", "", evidence)


def _sentences(item, evidence, compared, where):
    """Check "quantity: 1.2 (a) vs. 3.4 (b); difference ..., n = 5, p = ..." of each comparison."""
    done = [c for c in compared if len(c.seeds) >= c.asked]
    partial = [c for c in compared if 0 < len(c.seeds) < c.asked]
    for match, c in zip(PARTIAL.finditer(evidence), partial, strict=True):
        for printed, sample in ((match[2], c.low), (match[4], c.high)):
            item.tally.number("mean", where, printed, interval([sample[s] for s in c.seeds])[0], 4)
        item.tally.same("n", where, int(match[6]), len(c.seeds))
    for match, c in zip(AGAINST.finditer(evidence), done, strict=True):
        means = [interval([sample[s] for s in c.seeds])[0] for sample in (c.low, c.high)]
        item.tally.number("mean", where, match[2], means[0], 4)
        item.tally.number("mean", where, match[4], means[1], 4)
        mean, half_width = interval(c.differences)
        item.tally.number("difference", where, match[6], mean, 3)
        item.tally.number("difference, half-width", where, match[7], half_width, 2)
        item.tally.same("n", where, int(match[8]), len(c.seeds))
        item.tally.p_value("Holm's p", where, match[9], c.p_holm)
    rest = UNTESTABLE.sub("", NO_PAIR.sub("", PARTIAL.sub("", AGAINST.sub("", evidence))))
    if match := re.search(
        r"Holm's correction for (\d+) comparisons(?:, open until the (\d+) missing ones are available)?", rest
    ):
        item.tally.same("size of a family", where, int(match[1]), compared[0].family)
        if match[2]:
            item.tally.same("size of a family", where, int(match[2]), compared[0].waiting)
        rest = rest.replace(match[0], "")
    return rest


def _gain(item, compared):
    """Return by how many points SAM with one ascent step is better than training without SAM."""
    runs = [item.study.runs[name] for name in without_sam(item)]
    errors = [100 * run["metrics"]["test_error"] for run in runs]
    return interval(errors)[0] - interval(list(compared.high.values()))[0]


def _kept(item, claim, status, compared, rest, where):
    """Return whether an arm keeps 90 % of SAM's gain, and what is left of the sentence; the claim says its cost."""
    cost = re.search(r", at ([\d.]+) pass", claim)
    if cost and compared.differences:
        item.tally.number("passes", where, cost[1], item.passes(compared.condition, compared.names[0]), 4)
    elif cost:
        item.tally.skip(where, cost[0], "text")  # no run yet
    rest = re.sub(r"(?<= )\d+%(?= of the gain)|m = \d+|1/\d+", "", rest)
    if not compared.differences:
        return status, rest
    if compared.gated:
        return status, rest
    mean, half_width = interval(compared.differences)
    return "kept" if status == "reproduced" else "not kept" if mean - half_width > 0 else status, rest


def _gates_of_arms(item, compared):
    """Return why an arm is not tested: SGD's training error, or a radius at the edge of its grid."""
    base, sam = (item.arm(compared.condition, n) for n in ("SGD", item.reference(compared.condition)))
    own, found = item.arm(compared.condition, compared.names[0]), []
    error = 100 * sum(run["metrics"]["train_error"] for run in base.runs) / len(base.runs)
    most = NOISY_GATE if base.runs[0]["spec"].get("data", {}).get("label_noise") else GATE
    found += [f"SGD ends with a training error of {error:.1f} %, above {most:g} %"] * (error > most)
    for entry in (sam, own):
        tried = [factor(optim(r, "rho")) for r in item.study.candidates(entry.runs[0]["spec"]) if optim(r, "rho")]
        rho = optim(entry.runs[0], "rho")
        at_edge = bool(rho) and len(set(tried)) > 2 and factor(rho) in (min(tried), max(tried))
        found += [f"{entry.row[0]}'s rho is at the edge of its grid"] * at_edge
    errors = [item.errors(e) for e in (base, sam)]
    mean, half_width = interval([errors[0][seed] - errors[1][seed] for seed in sorted(errors[0])])
    found += [f"the gain of {sam.row[0]}, {mean:.1f} ± {half_width:.1f} points, may be nothing"] * (mean <= half_width)
    return found


def _in_words(item, evidence, c, where):
    """Check the demo's sentence, with both errors and the p-value; its baseline is the better one too."""
    test = rf"paired t-test over (\d+) seeds, Holm's correction for (\d+) comparisons, ({P_VALUE})\)"
    match = re.search(rf"([\d.]+) % \((.+?)\) and ([\d.]+) % \((.+?)\).*{test}", evidence)
    item.tally.number("mean", where, match[1], interval(list(c.high.values()))[0])
    item.tally.number("mean", where, match[3], interval(list(c.low.values()))[0])
    item.tally.same("n", where, int(match[5]), len(c.seeds))
    item.tally.same("size of a family", where, int(match[6]), c.family)
    item.tally.p_value("Holm's p", where, match[7], c.p_holm)
    item.tally.same("label", where, (match[4], match[2]), c.names, 0)
    labels = next(e.row[0] for e in item.entries if e.runs[0]["name"] == c.runs[0]["name"])
    words = "clean labels" if labels == "0%" else f"{labels[:-1]} % noisy labels"
    item.tally.same("label", where, evidence.startswith(f"With {words}, "), True, 0)
    methods = re.findall(r"the test error of (.+?) is", evidence)
    item.tally.same("label", where, methods, [c.names[0]] * len(methods), 0)
    rivals = [e for e in item.entries if e.column == "test error" and e.row[0] == labels and e.row[1].startswith("SGD")]
    if "stopped early" in c.names[1]:
        return c.status, ""
    rivals = [e for e in rivals if "stopped early" not in e.row[1]]
    means = {e.row[1]: sum(r["metrics"]["test_error"] for r in e.runs) for e in rivals}
    item.tally.same("choice of the baseline", where, c.names[1], min(means, key=means.__getitem__))
    return c.status, ""


def _sign_tests(item, items, status, rest, where):
    few = False
    for method, lower, total, p in re.findall(
        rf"([\w, =]+?): lower in (\d+) of (\d+) conditions \(sign test, ({P_VALUE})\)", rest
    ):
        found, _ = reductions(items, method.strip("; ").removeprefix("The mean error is "))
        count = sum(value > 0 for value, _ in found)
        item.tally.same("sign test", where, (int(lower), int(total)), (count, len(found)), 2)
        item.tally.p_value("sign test", where, p, sign_test(count, len(found)))
        few |= 2 * count <= len(found)
    rest = re.sub(r"[\w, =]+: lower in \d+ of \d+ conditions \(sign test, [^)]*\)", "", rest)
    return "inconclusive" if few and status == "reproduced" else status, rest


def _bounds(item, evidence, where):
    runs = {r["name"]: r for e in item.entries for r in e.runs}.values()
    totals = [
        (f["total"], run["metrics"]["test_error"])
        for run in runs
        for n, f in run["measured"].items()
        if n.startswith("bound")
    ]
    match = re.match(
        r"(\d+) of (\d+) bounds are vacuous, above an error of 1: ([\d.]+) to ([\d.]+), and the test error is "
        r"([\d.]+) in the mean; (\d+) are below",
        evidence,
    )
    vacuous, violated = sum(total > 1 for total, _ in totals), sum(total < error for total, error in totals)
    item.tally.same("bound", where, [int(match[i]) for i in (1, 2, 6)], [vacuous, len(totals), violated], 3)
    item.tally.number("bound", where, match[3], min(t for t, _ in totals), 3)
    item.tally.number("bound", where, match[4], max(t for t, _ in totals), 3)
    item.tally.number("mean", where, match[5], sum(r["metrics"]["test_error"] for r in runs) / len(runs), 3)
    return "not reproduced" if violated else "inconclusive" if vacuous == len(totals) else "reproduced", ""


def _noise(item, evidence, where):
    runs = {r["name"]: r for e in item.entries for r in e.runs}.values()
    effects = [facts(run, "noise")[scale] for run in runs for scale in ("stated", "proof")]
    match = re.search(r"in (\d+) of (\d+) measurements .* by at most ([\d.]+) in any; 0.001 counts", evidence)
    # The p-value whose interval of confidence 1 - p ends at 0.
    lengths = [abs(e["rise"]) / e["half_width"] * stats.t.ppf(0.975, e["num_draws"] - 1) for e in effects]
    p_values = [2 * stats.t.sf(t, e["num_draws"] - 1) for t, e in zip(lengths, effects, strict=True)]
    falls = sum(e["rise"] < 0 and p < SIGNIFICANT for e, p in zip(effects, holm(p_values), strict=True))
    lowest = min(e["rise"] - e["half_width"] for e in effects)
    item.tally.same("noise", where, (int(match[1]), int(match[2])), (falls, len(effects)), 2)
    item.tally.number("noise", where, match[3], max(0.0, -lowest), 2)
    return "not reproduced" if falls else "reproduced" if lowest >= -NO_FALL else "inconclusive", ""


def _change(item, evidence, compared, where):
    """Check a difference of differences, and its gate: both baselines fit, and both grids hold the chosen rho."""
    begin = evidence.index("SAM's change of the ")
    said, expected = evidence[:begin], gates(item, compared)
    said = said.removeprefix("Not a test of the claim at this scale: ").removesuffix(". ")
    item.tally.same("gate", where, said, "; ".join(expected), len(expected))
    return compared.status, _sentences(item, evidence[begin:], [compared], where)


def _gates_of_change(item, compared):
    found = []
    for m in compared.names:
        sgd, sam = (
            next(r for r in compared.runs if f"m = {_size(r)}" == m and bool(optim(r, "rho")) == uses)
            for uses in (False, True)
        )
        replicas = [r for r in compared.runs if f"m = {_size(r)}" == m and not optim(r, "rho")]
        error = 100 * sum(r["metrics"]["train_error"] for r in replicas) / len(replicas)
        if error > GATE:
            found.append(f"SGD, {m} ends with a training error of {error:.1f} %, above {GATE:g} %")
        condition = f"{sgd['spec']['model']['name']}, {sgd['spec']['data']['name']}"
        if edge := _edge(item, condition, f"SAM, {m}", sam):
            found.append(f"SAM, {m}'s {edge} is at the edge of its grid")
    return found


def _size(run):
    return optim(run, "m") or run["spec"]["data"].get("batch_size", 128)


def _best_other_rho(item, compared, where):
    """Check that of the rhos above 0, but for the claim's own, the one with the lowest mean was taken."""
    column = re.search(r"\d+ % noise", compared.metric)[0]
    entries = [e for e in item.entries if e.column == column and e.row not in (["0"], [compared.names[0][6:]])]
    means = {e.row[0]: sum(r["metrics"]["valid_error"] for r in e.runs) / len(e.runs) for e in entries}
    best = min(means, key=means.__getitem__)
    item.tally.same("choice of the baseline", where, compared.names[1], f"rho = {best}")
