"""The stored runs: which belong together, what was chosen, and every quantity that a page prints of a run.

Written from the definitions (plan.json, docs/reproduction.md, textbooks). Imports nothing of flatmin.
"""

import copy
import itertools
import json
import math
import re
from dataclasses import dataclass
from datetime import datetime
from functools import cache

import numpy as np
from scipy import stats

TUNING_SEED = 1000
MOST_GROWTH = 3
"""How often a grid may grow."""
SIGNIFICANT = 0.05
DEFAULT_MODEL = "wrn-16-2"
"""Which specs leave out."""


@dataclass
class Group:
    """Runs of a registered plan that differ in their seeds, or the runs that choose a setting."""

    runs: list[str]
    """Those that exist."""
    asked: int
    tried: list[dict]
    """The specs of a grid."""
    chosen: dict | None
    """The spec of its choice; None before all of the grid have run."""
    wanted: set[tuple[str, int]]
    """Each run that is asked for, by spec and seed: two groups may ask for the same ones."""


class Study:
    """The files of one directory of results."""

    def __init__(self, directory):
        lines = (directory / "runs.jsonl").read_text().splitlines()
        self.runs = {run["name"]: run for run in map(json.loads, lines)}
        for run in self.runs.values():  # what a spec leaves out
            run["spec"] = {"optim": {}, **run["spec"], "model": {"name": DEFAULT_MODEL, **run["spec"].get("model", {})}}
        self.environments = json.loads((directory / "environments.json").read_text())
        self.about = json.loads((directory / "study.json").read_text())
        plan = directory / "plan.json"
        self.plan = json.loads(plan.read_text()) if plan.exists() else {"items": {}, "changes": []}
        self.tuned, self.by_spec = {}, {}
        for run in self.runs.values():
            self.by_spec.setdefault(key(run["spec"]), {})[run["seed"]] = run["name"]

    def replicas(self, spec):
        """Return all stored runs of a spec by seed."""
        return self.by_spec.get(key(spec), {})

    def candidates(self, spec, *settings):
        """Return the runs that chose among settings like a spec's: held-out data, one seed, other values of some."""
        varies = settings or ("rho",)
        if varies not in self.tuned:
            found = self.tuned[varies] = {}
            for run in self.runs.values():
                if run["seed"] == TUNING_SEED and "valid_error" in run["metrics"]:
                    found.setdefault(key(without(run["spec"], *varies)), []).append(run)
        return self.tuned[varies].get(key(without(spec, *varies)), [])

    def grid(self, run):
        """Return the replicas with a run's seed that differ from it in rho only."""
        like = {**run["spec"], "optim": {k: v for k, v in run["spec"]["optim"].items() if k != "rho"}}
        found = (r for r in self.runs.values() if r["seed"] == run["seed"] and optim(r, "rho"))
        return [
            r for r in found if key({**r["spec"], "optim": {**r["spec"]["optim"], "rho": 0}}) == key(with_rho(like, 0))
        ]

    def planned(self, item):
        """Return the runs of a registered plan by group, and the settings that its grids tried and chose.

        A grid whose best value is at its edge grows by a factor of 2, at most three times. A group that has a grid
        takes what the grid chose; it has no runs before.
        """
        groups = self._with_chosen_rates(self.plan["items"].get(item, {"groups": {}})["groups"])
        chooses = {name: name.removesuffix(", choosing").replace("Bootstrap + ", "") for name in groups}
        grids = {chooses[name]: self._grid(g) for name, g in groups.items() if name.endswith(", choosing")}
        planned = {}
        for name, group in groups.items():
            # Bootstrapped methods have the settings of those they follow.
            specs, chosen = grids.get(chooses[name], (variants(group), group["spec"]))
            chosen = None if group.get("waits") else chosen
            if group["varies"]:
                runs = [
                    self.replicas(spec)[seed]
                    for spec in specs
                    for seed in group["seeds"]
                    if seed in self.replicas(spec)
                ]
                wanted = {(key(spec), seed) for spec in specs for seed in group["seeds"]}
                planned[name] = Group(runs, len(wanted), specs, chosen, wanted)
            else:
                spec = None
                if chosen is not None:
                    mixup = chosen.get("data", {}).get("mixup")
                    spec = with_settings({**group["spec"], "optim": chosen.get("optim", {})}, {"data.mixup": mixup})
                replicas = {} if spec is None else self.replicas(spec)
                runs = [replicas[seed] for seed in group["seeds"] if seed in replicas]
                wanted = {
                    (key(spec or group["spec"]), seed) for seed in group["seeds"]
                }  # the first stands for a choice
                planned[name] = Group(runs, len(group["seeds"]), [], spec, wanted)
        return planned

    def asked(self, planned):
        """Return how many runs the groups of a plan ask for, and how many of these do not exist."""
        wanted = set().union(*(group.wanted for group in planned.values()))
        return len(wanted), sum(seed not in self.by_spec.get(spec, {}) for spec, seed in wanted)

    def begun(self, planned, time):
        """Return how many of the runs that the groups ask for had begun at a time."""
        wanted = set().union(*(group.wanted for group in planned.values()))
        names = [self.by_spec[spec][seed] for spec, seed in wanted if seed in self.by_spec.get(spec, {})]
        starts = [run["sessions"][0]["started"] for run in map(self.runs.get, names) if run.get("sessions")]
        return sum(datetime.fromisoformat(start) < time for start in starts)

    def _with_chosen_rates(self, groups):
        """Return groups with the learning rate that SGD chose, which no plan can know, in all of its condition."""
        groups = dict(groups)
        for name, group in list(groups.items()):
            if group["varies"] and "optim.lr" in group["varies"][0]:
                _, chosen = self._grid(group)
                condition = name.removesuffix("SGD, choosing")
                for other in (n for n in groups if n.startswith(condition) and n not in (name, f"{condition}SGD")):
                    spec, rate = groups[other]["spec"], chosen and chosen["optim"]["lr"]
                    spec = spec if rate is None else with_settings(spec, {"optim.lr": rate})
                    groups[other] = {**groups[other], "spec": spec, "waits": rate is None}
        return groups

    def _grid(self, group):
        """Return the specs of a grid that has grown as far as it may, and the best; None while one has no run.

        Only grids of rho and of the learning rate grow.
        """
        setting = next(iter(group["varies"][0]))
        grows = setting in ("optim.rho", "optim.lr")
        specs = dict(zip((tuple(v.values()) for v in group["varies"]), variants(group), strict=True))
        for growth in range(1 + MOST_GROWTH):
            names = {values: self.replicas(spec).get(TUNING_SEED) for values, spec in specs.items()}
            if None in names.values():
                return list(specs.values()), None
            best = min(names, key=lambda values: self.runs[names[values]]["metrics"]["valid_error"])
            numbers = [factor(values[0]) for values in names]
            if not grows or factor(best[0]) not in (min(numbers), max(numbers)) or growth == MOST_GROWTH:
                break
            more = factor(best[0]) / 2 if factor(best[0]) == min(numbers) else 2 * factor(best[0])
            if setting == "optim.rho":
                more = "auto" if more == 1 else f"{more:.12g}x"
            specs[more,] = with_settings(group["spec"], {setting: more})
        return list(specs.values()), specs[best]


def variants(group):
    """Return the specs of a group of a registered plan: one for each of its settings that vary."""
    return [with_settings(group["spec"], values) for values in group["varies"] or [{}]]


def key(spec):
    """Return a spec as text without its name, its seed, and parts that are empty."""
    tree = {
        k: {n: v for n, v in part.items() if n != "seed" and v != DEFAULT_MODEL} if isinstance(part, dict) else part
        for k, part in spec.items()
    }
    return json.dumps({k: part for k, part in tree.items() if k != "name" and part != {}}, sort_keys=True)


def first_runs(group):
    """Return the runs of a registered group before its grid grows, by spec and seed."""
    specs = [with_settings(group["spec"], settings) for settings in group["varies"]] or [group["spec"]]
    return {(key(spec), seed) for spec in specs for seed in group["seeds"]}


def without(spec, *settings):
    """Return a spec without its held-out share and some settings of its optimizer."""
    spec = copy.deepcopy({k: part for k, part in spec.items() if k != "keep_every"})
    spec.get("data", {}).pop("validation", None)
    for setting in settings:
        spec.get("optim", {}).pop(setting, None)
    return spec


def with_settings(spec, settings):
    """Return a spec with other settings, which are named like "optim.rho"; None is a default, which specs leave out."""
    spec = copy.deepcopy(spec)
    for name, value in settings.items():
        part, _, setting = name.partition(".")
        spec.setdefault(part, {})[setting] = value
        if value is None:
            spec[part].pop(setting)
    return spec


def without_sam(item):
    """Return the replicas that are trained like the runs of an item, but without SAM, as far as they are stored."""
    specs = (with_settings(e.runs[0]["spec"], dict.fromkeys(("optim.rho", "optim.ascent_steps"))) for e in item.entries)
    spec = next(specs)
    return [name for seed, name in item.study.replicas(spec).items() if seed != TUNING_SEED]


def with_rho(spec, rho):
    """Return a spec with another radius."""
    return {**spec, "optim": {**spec.get("optim", {}), "rho": rho}}


def factor(rho):
    """Return a radius as a number: "auto" and "0.25x" are factors of the suggested one."""
    return 1.0 if rho == "auto" else float(str(rho).removesuffix("x"))


def optim(run, name, default=None):
    """Return a setting of a run's optimizer."""
    return run["spec"].get("optim", {}).get(name, default)


def paired_p(first, second):
    """Return the two-sided p-value of the paired t-test; NaN where all differences are one number but 0."""
    differences = np.subtract(first, second)
    rounding = 1e-6 * max(np.abs(first).max(), np.abs(second).max())
    if np.ptp(differences) <= rounding:
        return 1.0 if abs(differences[0]) <= rounding else math.nan
    t = differences.mean() / (differences.std(ddof=1) / math.sqrt(len(differences)))
    return float(2 * stats.t.sf(abs(t), len(differences) - 1))


def holm(p_values, missing=0):
    """Return Holm's adjusted p-values: the largest (k - rank) p so far; k counts those that are missing, too."""
    total = len(p_values) + missing
    adjusted, highest = [math.nan] * len(p_values), 0.0
    order = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=p_values.__getitem__)
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (total - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


@cache
def detectable(spread, pairs):
    """Return the mean difference that a two-sided paired t-test at 5 % shows with a probability of 80 %."""
    critical = stats.t.ppf(0.975, pairs - 1)
    low, high = 0.0, 20.0
    for _ in range(100):
        middle = (low + high) / 2
        power = stats.nct.sf(critical, pairs - 1, middle) + stats.nct.cdf(-critical, pairs - 1, middle)
        low, high = (middle, high) if power < 0.8 else (low, middle)
    return low * spread / math.sqrt(pairs)


def passes(spec, epochs):
    """Return forward and backward passes, relative to training without SAM for so many epochs."""
    settings = {"part": 1.0, "every": 1, "ascent_part": 1.0, **spec.get("optim", {})}
    if not settings.get("rho") or settings.get("direction") == "momentum":
        step = 1.0
    else:
        step = 1 + settings["part"] * settings["ascent_part"] / settings["every"]
    return step * spec["epochs"] / epochs


def facts(run, kind, **wanted):
    """Return what was measured of a run: the facts of a kind with some values; None if there are none."""
    found = [f for name, f in run.get("measured", {}).items() if name.partition("-")[0] == kind]
    found = [f for f in found if all(f.get(k) == v for k, v in wanted.items())]
    return found[0] if found else None


def rise(run, radius):
    """Return the mean of L(w + a d1 + b d2) - L(w) over 0 < |(a, b)| <= radius, on the plane of fewest points."""
    planes = [f for name, f in run["measured"].items() if name.startswith("landscape")]
    plane = min(planes, key=lambda f: f["points"])
    at, loss = plane["coordinates"], plane["loss"]
    center = loss[len(at) // 2][len(at) // 2]
    near = [
        loss[i][j] - center
        for (i, a), (j, b) in itertools.product(enumerate(at), repeat=2)
        if 0 < math.hypot(a, b) <= radius * (1 + 1e-9)
    ]
    return center if radius == 0 else sum(near) / len(near)


AT_LOSS = ("lambda_max where the training loss first falls below a value", "Where that is")
"""The captions of tables whose rows are an augmentation and a limit of the training loss."""


def at_loss(run, limit):
    """Return what was measured after the first saved epoch whose loss is below a limit; None if there is none.

    The epoch is found again among the losses that were evaluated, and numbers are those of the eigenvalues there.
    """
    found = facts(run, "spectrum_at_loss")
    first = next((i for i, loss in enumerate(found["losses"]) if loss < limit), None)
    if first is None:
        return None
    values = sorted(found["at_loss"][f"{limit:g}"]["eigenvalues"], reverse=True)
    numbers = {"lambda_max": values[0], "lambda_max/lambda_5": values[0] / values[4]}
    return {"epoch": (first + 1) * found["keep_every"], "loss": found["losses"][first], **numbers}


def limits(run):
    """Return the limits at which a run was measured."""
    return [float(limit) for limit in facts(run, "spectrum_at_loss")["at_loss"]]


def _largest_ratio(run):
    at = [at_loss(run, limit) for limit in limits(run)]
    found = [a["lambda_max/lambda_5"] for a in at if a is not None]
    return max([*found, *(f[RATIO] for f in spectra(run).values())])


def cosines(run):
    """Return the cosines by epoch."""
    return {f["epoch"]: f["cosine"] for n, f in run["measured"].items() if n.startswith("cosine")}


def spectra(run):
    """Return the spectra by epoch."""
    return {f["epoch"]: f for n, f in run["measured"].items() if n.startswith("spectrum-")}


def _first_half(run):
    found = cosines(run)
    early = [value for epoch, value in found.items() if epoch <= max(found) / 2]
    return sum(early) / len(early)


RATIO = "lambda_1_over_lambda_5"
BOUND = {
    "training error at the worst weights": "sharp_error",
    "training error": "error",
    "the root": "complexity",
    "bound: the last two": "total",
    "of the root: the weights' term": "weight_term",
    "of the root: confidence": "confidence_term",
    "of the root: union bound": "union_term",
    "norm of the weights": "weight_norm",
    "number of weights": "num_weights",
}


def percent(name):
    """Return how to read a metric of the last epoch in %."""
    return lambda run: 100 * run["metrics"][name]


def best_epoch(run):
    """Return the metrics of the epoch with the lowest validation error, the first of several."""
    lines = [dict(zip(run["curves"], line, strict=True)) for line in zip(*run["curves"].values(), strict=True)]
    return min((line for line in lines if line["valid_error"] is not None), key=lambda line: line["valid_error"])


def quantity(where):
    """Return how to read the number of a run that a place on the page is about; None if it is not known.

    ``where`` is the table's caption, the row's labels and the column's title.
    """
    if where.startswith("The suggested radius and the tuned one"):
        return (lambda run: run["metrics"]["rho"]) if where.endswith("| suggested rho") else percent("test_error")
    if "stopped early" in where:
        read = quantity(where.replace("stopped early", "stopped"))
        return None if read is None else lambda run: read({**run, "metrics": best_epoch(run)})
    if match := re.search(r"The bound on the error at rho = ([\d.]+)", where):
        rho = float(match[1])
        if "| test error" in where:
            return lambda run: run["metrics"]["test_error"]
        name = next((n for label, n in BOUND.items() if f"| {label}" in where), None)
        return None if name is None else lambda run: facts(run, "bound", rho=rho)[name]
    if "what Gaussian noise adds" in where:
        scale = "stated" if "as the theorem states" in where else "proof"
        return lambda run: facts(run, "noise")[scale]["rise"]
    if where.startswith(AT_LOSS):
        _, labels, column = where.split(" | ")
        limit, name = float(labels.split(", ")[1]), column.rpartition(", ")[0] or "lambda_max"
        return lambda run: at_loss(run, limit)[name]
    rules = (
        (r"largest lambda_max/lambda_5", _largest_ratio),
        (r"lambda_max/lambda_5 at the end", lambda run: spectra(run)[max(spectra(run))][RATIO]),
        (r"lambda_max at the end", lambda run: spectra(run)[max(spectra(run))]["lambda_max"]),
        (r"lambda_max$", lambda run: facts(run, "spectrum")["lambda_max"]),
        (r"m-sharpness$", lambda run: facts(run, "sharpness")["m_sharpness"]),
        (r"rise of the loss within 0\.5", lambda run: rise(run, 0.5)),
        (r"rise of the loss over the plane", lambda run: rise(run, math.inf)),
        (r"training loss of the last epoch", lambda run: run["metrics"]["train_loss"]),
        (r"\| (none|basic), rho$", lambda run: run["metrics"]["rho"]),
        (r"\| training loss", lambda run: rise(run, 0)),
        (r"cosine, first half", _first_half),
        (r"cosine, last epoch", lambda run: cosines(run)[max(cosines(run))]),
        (r"train error at w \+ eps", percent("perturbed_error")),
        (
            r"estimated sharpness$",
            lambda run: 100 * (run["metrics"]["perturbed_error"] - run["metrics"]["train_error"]),
        ),
        (r"[Vv]alidation error", percent("valid_error")),
        (r"test accuracy", lambda run: 100 - 100 * run["metrics"]["test_error"]),
        (r"training accuracy", lambda run: 100 - 100 * run["metrics"]["train_error"]),
        (r"train(ing)? error", percent("train_error")),
        (r"top-5 test error", percent("test_top5_error")),
        (r"test loss", lambda run: run["metrics"]["test_loss"]),
        (r"calibration error", percent("test_ece")),
        (r"test error|method - SAM", percent("test_error")),
    )
    # The most specific part decides: the column, then the row, then the caption.
    parts = where.split(" | ")
    for text in (f"| {parts[-1]}", f"| {parts[1]}", parts[0]):
        for pattern, read in rules:
            if re.search(pattern, text):
                return read
    return None


DATASETS = {
    "cifar10": "cifar10",
    "CIFAR-10": "cifar10",
    "fashion-mnist": "fashion-mnist",
    "Fashion-MNIST": "fashion-mnist",
}
WORDS = (
    (r"(?<![\w+] )\bSGD\b|\bno SAM\b|\bwithout SAM\b", lambda run, _: not optim(run, "rho")),
    (
        r"(?<!no )(?<!without )\bSAM\b|\bpart 1|\bevery \d|\bmomentum\b|\bascent on",
        lambda run, _: bool(optim(run, "rho")),
    ),
    (r"\bm = (\d+)", lambda run, m: int(m[1]) in (optim(run, "m"), run["spec"]["data"].get("batch_size", 128))),
    (r"(?:part|SAM on) 1/(\d+)", lambda run, m: optim(run, "part") == 1 / int(m[1])),
    (r"ascent on 1/(\d+)", lambda run, m: optim(run, "ascent_part") == 1 / int(m[1])),
    (r"every (\d+)th step", lambda run, m: optim(run, "every") == int(m[1])),
    (r"at weight (\d)", lambda run, m: optim(run, "weight") == float(m[1])),
    (r"\bmomentum\b", lambda run, _: optim(run, "direction") == "momentum"),
    (r"\bnorm layers\b", lambda run, _: optim(run, "perturb") == "norm"),
    (r"\bMixup\b", lambda run, _: run["spec"]["data"].get("mixup", 0) > 0),
    (r"\bBootstrap\b", lambda run, _: run["spec"]["data"].get("bootstrap") is True),
    (
        r"(?<![\d.])(\d+) ?%(?= noise| noisy|, |$| \()",
        lambda run, m: run["spec"]["data"].get("label_noise", 0) == int(m[1]) / 100,
    ),
    (r"clean labels", lambda run, _: not run["spec"]["data"].get("label_noise")),
    (r"\b(wrn-\d+-\d+|timm/\w+)", lambda run, m: run["spec"]["model"]["name"] == m[1]),
    (r"(?<!, )\b(\d+) epochs", lambda run, m: run["spec"]["epochs"] == int(m[1])),
    (r"\b(first|second) order", lambda run, m: bool(optim(run, "second_order")) == (m[1] == "second")),
    (
        r"(cifar10|fashion-mnist|CIFAR-10|Fashion-MNIST)",
        lambda run, m: run["spec"]["data"].get("name", "digits") == DATASETS[m[1]],
    ),
    (r"^[\w-]+, (basic|cutout|none|autoaugment),", lambda run, m: run["spec"]["data"].get("augment", "none") == m[1]),
    (r"^(basic|none), ", lambda run, m: run["spec"]["data"].get("augment", "none") == m[1]),
    (r"\bp = inf", lambda run, _: optim(run, "p") in ("inf", math.inf)),
    (r"^random\b", lambda run, _: optim(run, "direction") == "random"),
)


def misnamed(label, run):
    """Return the words of a label that a run's settings contradict."""
    return [m[0] for pattern, holds in WORDS if (m := re.search(pattern, label)) and not holds(run, m)]


def sign_test(successes, total):
    """Return the two-sided p-value of the sign test."""
    return min(1.0, 2 * stats.binom.cdf(min(successes, total - successes), total, 0.5)) if total else 1.0


def curve(run, metric):
    """Return a metric along training by epoch, where it was measured."""
    curves = run.get("curves", {})
    return {e: v for e, v in zip(curves.get("epoch", ()), curves.get(metric, ()), strict=True) if v is not None}


def gains(few, many, part):
    """Return by seed how much more error many ascent steps find than few: in the first half, in the last tenth."""
    found = {}
    for one, several in zip(*(sorted(runs, key=lambda r: r["seed"]) for runs in (few, many)), strict=True):
        sharpness = []
        for run in (one, several):
            perturbed, plain = curve(run, "perturbed_error"), curve(run, "train_error")
            sharpness.append([100 * (perturbed[e] - plain[e]) for e in sorted(perturbed.keys() & plain.keys())])
        more = np.subtract(sharpness[1], sharpness[0])
        half, tenth = max(1, len(more) // 2), max(1, len(more) // 10)
        values = {"first half of training": more[:half].mean(), "last tenth": more[-tenth:].mean(), "nothing": 0.0}
        found[one["seed"]] = float(values[part])
    return found
