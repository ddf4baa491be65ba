"""The numbers of a page's figures, and the two figures that are computed of many runs. Imports nothing of flatmin."""

import itertools
import re
from dataclasses import dataclass
from functools import cache

import numpy as np
from recompute.page import NUMBER, interval
from recompute.rule import rule_points
from recompute.runs import at_loss, cosines, curve, factor, facts, limits, optim, percent
from scipy import stats

NUM_SHUFFLES, NUM_SWAPS = 200, 199
HYPERPARAMETERS = ("width", "depth", "lr", "batch", "decay")


@dataclass(eq=False)
class Score:
    """How well one m-sharpness predicts the generalization gap."""

    values: list[float]
    gaps: list[float]
    grid: list[tuple[float, ...]]
    score: float
    null: tuple[float, float]
    tau: float


def information(measure, gap, cell):
    """Return I(V_mu; V_g | U) / H(V_g | U) over all ordered pairs of models; every value of U weighs the same.

    V says whether the measure, or the gap, of the first model is larger; ``cell`` numbers the values of U.
    """
    kinds = 2 * (gap[:, None] > gap) + (measure[:, None] > measure)
    counts = np.zeros((cell.max() + 1, 4))
    np.add.at(counts, (cell, kinds), 1)
    shares = counts / counts.sum(axis=1, keepdims=True)
    of_gap, of_measure = shares @ [[1, 0], [1, 0], [0, 1], [0, 1]], shares @ [[1, 0], [0, 1], [1, 0], [0, 1]]
    entropy = [-(s * np.log2(np.where(s > 0, s, 1))).sum(axis=1).mean() for s in (of_gap, of_measure, shares)]
    return (entropy[0] + entropy[1] - entropy[2]) / entropy[0]


def score_of(values, gaps, grid):
    """Return the smallest information given two hyperparameters."""
    measure, gap = np.array(values, float), np.array(gaps, float)
    return min(information(measure, gap, cell) for cell in _cells(tuple(grid)))


@cache
def _cells(grid):
    """Return for every two hyperparameters the number of the values that each ordered pair of models has."""
    cells = []
    for pair in itertools.combinations(range(len(grid[0])), 2):
        _, label = np.unique([[h[i] for i in pair] for h in grid], axis=0, return_inverse=True)
        label = label.reshape(-1)
        cells.append(label[:, None] * (label.max() + 1) + label)
    return cells


def zoo(study, item):
    """Return the models that count, by their hyperparameters: those that reached the loss at which all are stopped."""
    named = {
        r["spec"]["name"].partition("/")[2]: r for r in study.runs.values() if r["spec"]["name"].startswith(f"{item}/")
    }
    grid = {tuple(float(x) for x in re.findall(r"[\d.]+(?:e-\d+)?", name)): run for name, run in named.items()}
    grid = dict(sorted(grid.items()))
    return {h: r for h, r in grid.items() if r["metrics"]["train_loss"] <= r["spec"]["stop_loss"]}, len(grid)


def gap_of(run):
    """Return the generalization gap in points."""
    return 100 * (run["metrics"]["test_error"] - run["metrics"]["train_error"])


@cache
def scores(study, item):
    """Return the scores by m; None is the whole training set."""
    models, _ = zoo(study, item)
    size = next(iter(models.values()))["spec"]["data"]["train_size"]
    measured = {f["m"] for r in models.values() for n, f in r["measured"].items() if n.startswith("sharpness")}
    gaps, grid = [gap_of(r) for r in models.values()], list(models)
    found = {}
    for m in (*sorted(measured - {size}), size):
        values = [facts(r, "sharpness", m=m)["m_sharpness"] for r in models.values()]
        rng, measure, gap = np.random.default_rng(0), np.array(values), np.array(gaps)
        sets = _cells(tuple(grid))
        shuffles = [rng.permutation(measure) for _ in range(NUM_SHUFFLES)]
        null = [min(information(shuffled, gap, s) for s in sets) for shuffled in shuffles]
        low, high = np.quantile(null, [0.025, 0.975])
        tau = float(stats.kendalltau(values, gaps).statistic)
        found[None if m == size else m] = Score(values, gaps, grid, score_of(values, gaps, grid), (low, high), tau)
    return found


def swap_test(one, two):
    """Return the p-value that two measures predict equally well: their ranks are swapped at random, model by model."""
    ranks = np.stack([stats.rankdata(one.values), stats.rankdata(two.values)])
    rng = np.random.default_rng(0)

    def difference(pair):
        return score_of(pair[0], one.gaps, one.grid) - score_of(pair[1], one.gaps, one.grid)

    observed = abs(difference(ranks))
    pairs = [np.where(rng.random(len(one.gaps)) < 0.5, ranks, ranks[::-1]) for _ in range(NUM_SWAPS)]
    return (1 + sum(abs(difference(pair)) >= observed - 1e-12 for pair in pairs)) / (1 + NUM_SWAPS)


def check_predictive(item):
    """Check scores, the range of a shuffled measure, and Kendall's tau."""
    block = item.section.block("Predictive power of m-sharpness")
    for m, score, shuffled, tau in block.rows:
        where, found = f"{item.name}, m = {m}", scores(item.study, item.name)[None if m == "n" else int(m)]
        item.tally.number("score", where, score.split(" (")[0], found.score, 4)
        for printed, value in zip(shuffled.split(" to "), found.null, strict=True):
            item.tally.number("score of a shuffled measure", where, printed, value)
        item.tally.number("Kendall's tau", where, tau, found.tau)


def check_figures(item, items):
    """Check each table of a figure's numbers: series, x, y and its interval; and the width of a smoothed spectrum."""
    for block in item.section.blocks:
        if block.is_figure and block.rows:
            _check_figure(item, items, block)
        elif block.is_figure and (
            match := re.search(r"with a Gaussian of width (\d+(?:\.\d+)?)", " ".join(block.lines))
        ):
            runs = [item.study.runs[name] for name in block.runs]
            epoch = re.search(r"after epoch (\d+)", block.caption)
            nodes = [x for run in runs for x in _nodes(run, None if epoch is None else int(epoch[1]))]
            where = f"{item.name}, {block.caption}"
            item.tally.number("width of a spectrum", where, match[1], 0.01 * (max(nodes) - min(nodes)), 2)


def _nodes(run, epoch):
    """Return where a run's finest spectrum has its nodes, at an epoch or at the end."""
    found = [f for n, f in run["measured"].items() if n.startswith("spectrum-")]
    epoch = max(f["epoch"] for f in found) if epoch is None else epoch
    return max((f["nodes"] for f in found if f["epoch"] == epoch), key=len)


def _check_figure(item, items, block):
    expected, seen = dict(_points(item, items, block)), []
    for series, x, y, *point in block.rows:
        where = f"{item.name}, figure {block.caption}: {series}, {x}"
        if series == "claimed by the paper":
            item.tally.papers += len(NUMBER.findall(y))
            continue
        seen.append((series, *point) if "m-sharpness and gen" in block.caption else (series, _number(x)))
        found = expected[seen[-1]]
        at, values, *name = found if isinstance(found, tuple) else (_number(x), found)
        item.tally.number("figure: x", where, x, at, 6)
        if name:
            item.tally.same("figure: point", where, point, name, 0)
        if " ± " in y:
            item.tally.interval("figure: y", where, y, values)
        else:
            item.tally.number("figure: y", where, y, interval(values)[0], None if "%" in block.header[2] else 4)
    item.tally.same(
        "figure: points", f"{item.name}, {block.caption}", sorted(map(str, seen)), sorted(map(str, expected))
    )


def _number(text):
    return round(float(text), 9)


def _points(item, items, block):
    """Yield what a figure shows: the series and x (or the model's name), and the values behind the point."""
    runs = [item.study.runs[name] for name in block.runs]
    title = block.caption
    if title.startswith("Error reduction"):
        for series in dict.fromkeys(row[0] for row in block.rows if row[0].startswith("measured: ")):
            values = sorted(reductions(items, series.removeprefix("measured: "))[0])
            yield from (((series, float(i)), (i, [value], name)) for i, (value, name) in enumerate(values))
    elif match := re.match(r"(lambda_max(?:/lambda_5)?) over the training loss", title):
        read = lambda run: {x: a[match[1]] for x in limits(run) if (a := at_loss(run, x)) is not None}  # noqa: E731
        for (series, limit), found in _grouped(runs, _method, read).items():
            yield (series, limit), found
    elif title == "Test error over rho, in units of the suggestion":
        yield from rule_points(item, runs)
    elif title.startswith("Test error over ") and "training" not in title:
        yield from _over_rho(item, runs, title)
    elif title.startswith("Cosine between"):
        for (series, epoch), found in _grouped(runs, lambda r: f"{_order(r)} training", cosines).items():
            yield (series, float(epoch)), found
    elif title.startswith("Training error at w + eps"):
        for metric, name in (("perturbed_error", "train, at w + eps"), ("test_error", "test")):
            for (series, epoch), found in _grouped(runs, _order, lambda r, m=metric: curve(r, m)).items():
                yield (f"{name}, {series}", float(epoch)), [100 * v for v in found]
    elif title.startswith("Test error over training"):
        name = lambda r: re.sub(r", (clean|\d+ % noisy) labels.*", "", r["spec"]["name"])  # noqa: E731
        for (series, epoch), found in _grouped(runs, name, lambda r: curve(r, "test_error")).items():
            yield (series, float(epoch)), [100 * v for v in found]
    elif title.startswith("The bound over"):
        bounds = lambda r: {f["rho"]: f["total"] for n, f in r["measured"].items() if n.startswith("bound")}  # noqa: E731
        grouped = _grouped(runs, _method, bounds)
        yield from (((series, rho), found) for (series, rho), found in grouped.items())
        yield from (
            (("above this it says nothing", x), [1.0]) for x in (min(r for _, r in grouped), max(r for _, r in grouped))
        )
    elif title.startswith("Error over cost: "):
        yield from _over_cost(item, title.removeprefix("Error over cost: "))
    elif title.startswith("Predictive power"):
        found = scores(item.study, item.name)
        size = float(next(iter(zoo(item.study, item.name)[0].values()))["spec"]["data"]["train_size"])
        for m, score in found.items():
            numbers = (
                ("m-sharpness", score.score),
                ("shuffled, 97.5 %", score.null[1]),
                ("shuffled, 2.5 %", score.null[0]),
            )
            yield from (((series, float(m or size)), [value]) for series, value in numbers)
    elif title.startswith("Each model: m-sharpness"):
        found = scores(item.study, item.name)
        for m in (min(k for k in found if k), None):
            for h, value, gap in zip(found[m].grid, found[m].values, found[m].gaps, strict=True):
                said = zip(("width", "depth", "learning rate", "batch size", "weight decay"), h, strict=True)
                yield (f"m = {m or 'n'}", ", ".join(f"{n} {v:g}" for n, v in said)), (value, [gap])


def _grouped(runs, name, read):
    """Return the values of runs by the name of their method and x."""
    found = {}
    for run in runs:
        for x, value in read(run).items():
            found.setdefault((name(run), x), []).append(value)
    return found


def _method(run):
    return "SAM" if optim(run, "rho") else "SGD"


def _order(run):
    return "second order" if optim(run, "second_order") else "first order"


def _over_rho(item, runs, title):
    """Yield the test errors by m or kind of perturbation, and rho; p = inf in units of the Euclidean length."""
    groups = {}
    for run in runs:
        batch = run["spec"]["data"].get("batch_size", 128)
        if not optim(run, "rho"):
            name = "SGD"
        elif title.endswith("over rho"):
            name = f"m = {optim(run, 'm') or batch}"
        else:
            name = "p = inf" if optim(run, "p") else "random" if optim(run, "direction") else "p = 2"
        rho = factor(optim(run, "rho", 0.0))
        length = float(run["spec"]["name"].rpartition("rho=")[2]) if name == "p = inf" else rho
        groups.setdefault((name, round(length, 9)), []).append(run)
    error = percent("test_error")
    for (name, length), found in groups.items():
        if name == "p = inf":  # every weight moves by rho / sqrt(k), k the number of weights
            weights = (length / factor(optim(found[0], "rho"))) ** 2
            item.tally.number(
                "figure: x", f"{item.name}, number of weights", f"{weights:.0f}", float(item.num_weights())
            )
        if name != "SGD":
            said = f"{name}, rho = {length:g}, n = {len(found)}"
            yield (name, length), (length, [error(r) for r in found], said)
    plain = [error(r) for (name, _), found in groups.items() for r in found if name == "SGD"]
    if plain and title.endswith("over rho"):
        ends = [rho for name, rho in groups if name != "SGD"]
        yield from ((("SGD", x), [sum(plain) / len(plain)]) for x in (min(ends), max(ends)))


def front(points):
    """Return the points (cost, error, ...) that no other beats in error at the same cost or less."""
    best = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def _over_cost(item, condition):
    points = item.arms(condition)
    for cost, _, name, errors in points:
        kind = re.sub(r"(?<=ascent) on 1/\d+|, (half|twice) the epochs| \((clean|noisy) validation\)", "", name)
        yield (kind, round(cost, 9)), (cost, errors, name)
    for cost, error, name, _ in front(points):
        yield ("Pareto front", round(cost, 9)), (cost, [error], name)


def reductions(items, method):
    """Return the error reductions of a method over the conditions of Tables 1, 2, 3 and 5, and how many are asked for.

    Comparisons that fail their gate do not count, nor do methods of ours.
    """
    found, asked = [], {}
    for item in items:
        if re.match(r"Table [1235],", item.section.source):
            for condition, comparison in item.error_comparisons(method).items():
                asked.setdefault(condition, comparison)
    asked = {condition: c for condition, c in asked.items() if c is None or not c.gated}
    for condition, c in asked.items():
        if c is not None and c.differences:
            found.append(
                (100 * (1 - interval(list(c.low.values()))[0] / interval(list(c.high.values()))[0]), condition)
            )
    return found, asked
