"""The numbers of a page's figures. Imports nothing of flatmin."""

import re

from recompute.page import NUMBER, interval
from recompute.rule import rule_points
from recompute.runs import TUNING_SEED, at_loss, cosines, curve, factor, limits, optim, percent
from recompute.zoo import points as zoo_points


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
        named = block.caption.startswith(("Each setting: m-sharpness", "Error over cost: "))  # two may be at one place
        seen.append((series, *point) if named else (series, _number(x)))
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
    elif title.startswith(("Predictive power", "Each setting: m-sharpness")):
        yield from zoo_points(item, title)
    elif title == "Test error with micro-batches of m":
        for run in runs:
            item.tally.same("runs", f"{item.name}, {title}", run["seed"] != TUNING_SEED, True)
        name = lambda r: "SAM, one eps for every m" if optim(r, "rho") else "SGD by micro-batches of m"  # noqa: E731
        for (series, m), found in _grouped(runs, name, lambda r: {_m(r): 100 * r["metrics"]["test_error"]}).items():
            yield (series, float(m)), found
    elif title.startswith("Validation error over rho"):
        for run in runs:
            rho = round(factor(optim(run, "rho")), 9)
            yield (f"m = {_m(run)}", rho), [100 * run["metrics"]["valid_error"]]


def _m(run):
    return optim(run, "m") or run["spec"]["data"].get("batch_size", 128)


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
        yield (kind, name), (cost, errors)
    for cost, error, name, _ in front(points):
        yield ("Pareto front", name), (cost, [error])


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
