"""Figure 3, right: how well m-sharpness predicts the gap of many models, computed again. Imports nothing of flatmin."""

import itertools
import re
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from recompute.page import interval
from recompute.runs import SIGNIFICANT, facts, holm, optim
from scipy import stats

NUM_RESAMPLES, AT_ONCE = 5000, 100
TOLERANCE, DECAYED, LEAST = 0.1, 0.1, 72
"""Half of the band around the target loss, the learning rate at the end in units of its peak, and the gate."""
SEEDS = {0, 1}
LOSS = "training loss"
COUNTED = re.compile(
    r"(\d+) settings of (\d+) count; of (\d+) models (\d+) did not stop in the band, or diverged, and (\d+) are missing"
)


@dataclass
class Prediction:
    """Every predictor of one gap: values, score and Kendall's tau, by m (None: n); and a shuffled measure's range."""

    gaps: list[float]
    grid: list[tuple]
    values: dict
    score: dict
    tau: dict
    null: tuple[float, float]

    @cached_property
    def p(self):
        """The p-value that the smallest m and m = n predict equally well."""
        ranks = [stats.rankdata(self.values[m]) for m in (smallest(self), None)]
        swap = np.random.default_rng(0).random((NUM_RESAMPLES, len(self.gaps))) < 0.5
        mixed = [np.where(swap, b, a) for a, b in (ranks, ranks[::-1])]
        one, two = (scores_of(np.vstack([r, m]), self.gaps, self.grid) for r, m in zip(ranks, mixed, strict=True))
        differences = np.abs(one - two)
        return (1 + int((differences[1:] >= differences[0] - 1e-12).sum())) / (1 + NUM_RESAMPLES)


def hyperparameters(run):
    """Return what the grid varies: width, depth, batch size, weight decay, dropout, augmentation, learning rate."""
    depth, width = (int(n) for n in run["spec"]["model"]["name"].split("-")[1:])
    data = run["spec"]["data"]
    return (
        *(width, depth, data.get("batch_size", 128), optim(run, "weight_decay", 5e-4)),
        *(run["spec"]["model"].get("dropout", 0.0), data.get("augment", "none"), optim(run, "lr", 0.1)),
    )


def counts(run):
    """Return whether a model stopped in the band around its target loss, after the learning rate had decayed."""
    if "metrics" not in run:
        return False
    target, loss, lr = run["spec"]["target_loss"], run["metrics"]["fit_loss"], run["metrics"]["lr"]
    sharp = [f["m_sharpness"] for n, f in run["measured"].items() if n.startswith("sharpness")]
    decayed = lr <= DECAYED * optim(run, "lr", 0.1) * (1 + 1e-9)
    return decayed and abs(loss - target) <= TOLERANCE * target * (1 + 1e-12) and all(s is not None for s in sharp)


def zoo(study, item):
    """Return the settings with all their models, and those that count: both seeds do."""
    settings = {}
    for run in study.runs.values():
        if run["spec"]["name"].startswith(f"{item}/"):
            settings.setdefault(hyperparameters(run), {})[run["seed"]] = run
    order = sorted(settings, key=lambda h: [("none", "flip").index(x) if isinstance(x, str) else x for x in h])
    settings = {h: settings[h] for h in order}
    counting = {h: runs for h, runs in settings.items() if runs.keys() == SEEDS and all(map(counts, runs.values()))}
    return settings, counting


def mean_of(runs, read):
    """Return the mean of a number over the seeds of a setting."""
    return interval([read(run) for run in runs.values()])[0]


def gap_of(run):
    """Return the generalization gap in points."""
    return 100 * (run["metrics"]["test_error"] - run["metrics"]["fit_error"])


def scores_of(measures, gaps, grid):
    """Return for each row the smallest information given two hyperparameters."""
    larger_gap = (np.array(gaps, float)[:, None] > np.array(gaps, float)).astype(np.float32)
    kinds = [1 - larger_gap, larger_gap]
    labels = [
        np.unique([str([h[i] for i in pair]) for h in grid], return_inverse=True)[1].reshape(-1)
        for pair in itertools.combinations(range(len(grid[0])), 2)
    ]
    one_hots = [np.eye(label.max() + 1, dtype=np.float32)[label] for label in labels]
    smallest = []
    for some in np.array_split(measures, max(1, len(measures) // AT_ONCE)):
        larger = (some[:, :, None] > some[:, None, :]).astype(np.float32)
        larger_of_kinds = [larger * kind for kind in kinds]
        found = [_informations(larger_of_kinds, kinds, one_hot) for one_hot in one_hots]
        smallest.append(np.min([row for row in found if row is not None], axis=0))
    return np.concatenate(smallest)


def _informations(larger_of_kinds, kinds, one_hot):
    """Return I(V_mu; V_g | U) / H(V_g | U) of each measure over all ordered pairs of models; None where H is 0.

    V says whether the measure, or the gap, of the first model is larger. U has the labels of both models, and every
    value of it weighs the same. What a pair of labels counts is a product with both models' indicators.
    """
    totals = [one_hot.T @ kind @ one_hot for kind in kinds]
    joint = []
    for larger, total in zip(larger_of_kinds, totals, strict=True):
        ones = one_hot.T @ larger @ one_hot
        joint += [total - ones, ones]
    shares = np.stack(joint).astype(float) / (totals[0] + totals[1]).astype(float)
    of_gap = np.stack([shares[0] + shares[1], shares[2] + shares[3]])
    of_measure = np.stack([shares[0] + shares[2], shares[1] + shares[3]])
    of_gap, of_measure, both = (
        -(s * np.log2(np.where(s > 0, s, 1))).sum(axis=0).mean(axis=(1, 2)) for s in (of_gap, of_measure, shares)
    )
    return (of_gap + of_measure - both) / of_gap if of_gap.all() else None


def residuals(values, given):
    """Return what is left of the ranks when the least-squares line through another's ranks is taken out."""
    ranks, others = stats.rankdata(values), stats.rankdata(given)
    design = np.stack([np.ones(len(ranks)), others], axis=1)
    return list(np.round(ranks - design @ np.linalg.lstsq(design, ranks, rcond=None)[0], 9))


@cache
def prediction(study, item, adjusted):
    """Return how well m-sharpness with each m, and the training loss, predict the gap; adjusted for the latter."""
    models = zoo(study, item)[1]
    losses = [mean_of(runs, lambda r: r["metrics"]["fit_loss"]) for runs in models.values()]
    size = next(iter(models.values()))[0]["spec"]["data"]["train_size"]
    measured = [f["m"] for n, f in next(iter(models.values()))[0]["measured"].items() if n.startswith("sharpness")]
    values = {
        None if m == size else m: [mean_of(runs, lambda r, m=m: sharpness(r, m)) for runs in models.values()]
        for m in sorted(measured)
    }
    gaps = [mean_of(runs, gap_of) for runs in models.values()]
    if adjusted:
        values, gaps = {m: residuals(v, losses) for m, v in values.items()}, residuals(gaps, losses)
    else:
        values[LOSS] = losses
    grid = list(models)
    found = scores_of(np.array(list(values.values()), float), gaps, grid)
    rng = np.random.default_rng(0)
    shuffled = np.stack([rng.permutation(np.arange(len(gaps), dtype=float)) for _ in range(NUM_RESAMPLES)])
    low, high = np.quantile(scores_of(shuffled, gaps, grid), [0.025, 0.975])
    tau = {m: float(stats.kendalltau(v, gaps).statistic) for m, v in values.items()}
    return Prediction(gaps, grid, values, dict(zip(values, found, strict=True)), tau, (low, high))


def sharpness(run, m):
    """Return a model's m-sharpness."""
    return facts(run, "sharpness", m=m)["m_sharpness"]


def smallest(found):
    """Return the smallest m."""
    return min(m for m in found.score if isinstance(m, int))


def check_predictive(item, block):
    """Check scores, Kendall's tau, both also adjusted, and the numbers of the note below."""
    plain, adjusted = (prediction(item.study, item.name, a) for a in (False, True))
    for name, score, score_after, tau, tau_after in block.rows:
        key = None if name == "n" else int(name) if name.isdigit() else name
        for found, printed, one in ((plain, score, tau), (adjusted, score_after, tau_after)):
            if printed:
                item.tally.number("score", f"{item.name}, {name}", printed, found.score[key])
                item.tally.number("Kendall's tau", f"{item.name}, {name}", one, found.tau[key])
    said = re.search(
        r"scores ([\d.]+) to ([\d.]+), adjusted ([\d.]+) to ([\d.]+) .* between ([\d.]+) and ([\d.]+)\.",
        " ".join(block.lines),
    )
    losses = plain.values[LOSS]
    for printed, value in zip(said.groups(), (*plain.null, *adjusted.null, min(losses), max(losses)), strict=True):
        item.tally.number("score of a shuffled measure", item.name, printed, value)


def check_counts(item, line):
    """Check how many settings and models count; how many were asked for is known from the plan."""
    said = [int(n) for n in COUNTED.match(line).groups()]
    settings, counting = zoo(item.study, item.name)
    models = [run for runs in settings.values() for run in runs.values()]
    asked = sum(group.asked for group in item.planned.values()) or said[2]
    expected = [len(counting), asked // len(SEEDS), asked, sum(not counts(r) for r in models), asked - len(models)]
    item.tally.same("counts", f"{item.name}, notes", said, expected, 5)


def check_verdict(item, claim, evidence, where):
    """Check the scores of a verdict, its p-values, and what follows from them."""
    match = re.search(
        r"score ([\d.]+) for m = (\d+) and ([\d.]+) for m = n; (\d+) settings, (p [=<] [\d.]+), (p [=<] [\d.]+) after",
        evidence,
    )
    both = [prediction(item.study, item.name, adjusted) for adjusted in (False, True)]
    p_values = [found.p for found in both]
    number = int(claim.startswith("Adjusted"))
    found, p_holm = both[number], holm(p_values)[number]
    small, num = smallest(found), len(found.gaps)
    item.tally.number("score", where, match[1], found.score[small])
    item.tally.number("score", where, match[3], found.score[None])
    item.tally.same("n", where, (int(match[2]), int(match[4])), (small, num), 2)
    item.tally.p_value("p", where, match[5], p_values[number])
    item.tally.p_value("Holm's p", where, match[6], p_holm)
    if said := re.search(r"the training loss scores ([\d.]+)", evidence):
        item.tally.number("score", where, said[1].rstrip("."), found.score[LOSS])
    for name, limit in re.findall(r"(m = \w+) scores no more than a shuffled measure may \(up to ([\d.]+)\)", evidence):
        item.tally.number("score of a shuffled measure", where, limit, found.null[1])
        item.tally.same("score", where, found.score[None if name == "m = n" else small] <= found.null[1], True)
    for name, tau in re.findall(
        r"(m = \w+) orders the models the wrong way round \(Kendall's tau (-[\d.]+)\)", evidence
    ):
        item.tally.number("Kendall's tau", where, tau, found.tau[None if name == "m = n" else small])
    if num < LEAST:
        item.tally.same("gate", where, f"{num} settings count, fewer than {LEAST}" in evidence, True)
        return "not tested at this scale"
    holds = found.score[small] > max(found.score[None], found.null[1]) and found.tau[small] > 0
    return "inconclusive" if p_holm >= SIGNIFICANT else "reproduced" if holds else "not reproduced"


def points(item, title):
    """Yield what the two figures show: the series and x (or the setting's name), and the values behind the point."""
    plain, adjusted = (prediction(item.study, item.name, a) for a in (False, True))
    models = zoo(item.study, item.name)[1]
    size = float(next(iter(models.values()))[0]["spec"]["data"]["train_size"])
    if title.startswith("Predictive power"):
        for name, found in (("m-sharpness", plain), ("m-sharpness, adjusted", adjusted)):
            yield from (((name, float(m or size)), [s]) for m, s in found.score.items() if m != LOSS)
        for name, value in ((LOSS, plain.score[LOSS]), ("shuffled, 97.5 %", plain.null[1])):
            yield from (((name, x), [value]) for x in (float(smallest(plain)), size))
        return
    names = ("width", "depth", "batch size", "weight decay", "dropout", "augmentation", "learning rate")
    for m in (smallest(plain), None):
        for h, value, gap in zip(plain.grid, plain.values[m], plain.gaps, strict=True):
            said = ", ".join(f"{n} {v if isinstance(v, str) else f'{v:g}'}" for n, v in zip(names, h, strict=True))
            yield (f"m = {m or 'n'}", said), (value, [gap])
