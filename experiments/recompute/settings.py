"""The table of hyperparameters of an item, read again from the specs of its runs. Imports nothing of flatmin."""

import json
import re
from pathlib import Path

from recompute.page import NUMBER
from recompute.runs import DEFAULT_MODEL, TUNING_SEED, factor, optim, variants

DEFAULTS = {
    "batch_size": 128,
    "lr": 0.1,
    "schedule": "cosine",
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "augment": "none",
}
"""What a spec leaves out."""
DEMO = Path(__file__).parents[2] / "src/flatmin/lab/demo/settings.json"
"""What chose the demo's settings: its runs are not stored, their means are."""


def setting_text(run):
    """Return what methods choose, as the page writes it."""
    rho, m, mixup = optim(run, "rho"), optim(run, "m"), run["spec"]["data"].get("mixup")
    parts = [f"lr {optim(run, 'lr', 0.1):g}", f"decay {optim(run, 'weight_decay', 5e-4):g}"]
    parts += [f"rho {rho if isinstance(rho, str) else f'{rho:g}'}"] if rho else []
    parts += [f"m {m}"] if m else []
    parts += [f"mixup {mixup:g}"] if mixup else []
    return ", ".join(parts)


def check_settings(item):
    """Check each setting against the specs of the item's runs, or of its registered plan."""
    block = item.section.block("Hyperparameters and where they come from")
    specs = _specs(item)
    if not specs:  # neither runs nor a plan yet
        item.tally.skip(f"{item.name}, hyperparameters", " ".join(row[1] for row in block.rows), "text")
        return
    for name, value, source, note in block.rows:
        where = f"{item.name}, hyperparameters, {name}"
        if not item.has_plan and item.says_missing:  # the settings of runs that neither a plan nor a run tells
            item.tally.skip(where, value, "text")
            continue
        count = max(1, len(NUMBER.findall(value)))
        expected = _chosen(item, name) if source == "validation" else _values(item, name, specs)
        if expected is None:
            item.tally.skip(where, value, "a setting that specs do not have")
            continue
        item.tally.same("setting", where, sorted(value.split(", ")), sorted(", ".join(expected).split(", ")), count)
        if match := re.fullmatch(r"the best of (\d+)", note):
            item.tally.same(
                "setting", where, int(match[1]), len(next(t for k, t in item.choices.items() if ", ".join(k) == name))
            )
    if item.section.source == "flatmin demo":
        _demo_choices(item)


def _specs(item):
    if item.has_plan:
        groups = {name: g for name, g in item.planned.items() if not name.endswith(", choosing")}
        plan = item.study.plan["items"][item.name]["groups"]
        found = [variants(plan[name]) if plan[name]["varies"] else [g.chosen] for name, g in groups.items()]
        chosen = [spec for specs in found for spec in specs if spec is not None]
        return chosen or [plan[name]["spec"] for name in groups if name.endswith(", SGD")]
    runs = [item.study.runs[name] for name in item.section.runs]
    return [r["spec"] for r in ([r for r in runs if r["seed"] != TUNING_SEED] or runs)]


def _chosen(item, name):
    for (condition, method), tried in item.choices.items():
        if f"{condition}, {method}" == name:
            return [setting_text(run) for _, run, mark in tried if mark]
    if item.section.source != "flatmin demo":
        return None
    chosen = json.loads(DEMO.read_text())["chosen"]
    by_name = {"model": chosen["network"], "learning rate": chosen["lr"], "rho, clean labels": chosen["rho"]["0.0"]}
    return [str(by_name.get(name, chosen["rho"]["0.4"]))]


def _values(item, name, specs):
    """Return all values of a setting; None for what a spec does not say."""

    def every(part, key):
        return dict.fromkeys(s.get(part, {}).get(key, DEFAULTS.get(key)) for s in specs)

    if name == "model":
        models = [{"name": DEFAULT_MODEL, **s.get("model", {})} for s in specs]
        return dict.fromkeys(m["name"] + ", without batch norm" * (m.get("norm") == "none") for m in models)
    if name == "training images":
        sizes = ((s["data"].get("train_size"), s["data"].get("name", "digits")) for s in specs)
        return dict.fromkeys(f"{'all' if n is None else f'{n:,}'} of {data}" for n, data in sizes)
    if name == "momentum":
        return [f"{m:g}" for m in every("optim", "momentum")] + ["Nesterov's"]
    if name == "epochs":
        return dict.fromkeys(str(s["epochs"]) for s in specs)
    simple = {
        "augmentation": ("data", "augment"),
        "batch size": ("data", "batch_size"),
        "learning rate": ("optim", "lr"),
    }
    simple |= {"learning-rate schedule": ("optim", "schedule"), "weight decay": ("optim", "weight_decay")}
    simple |= {"gradient clipping": ("optim", "clip_norm"), "loss to stop at": ("", "target_loss")}
    if name == "loss to stop at":
        return dict.fromkeys(f"{s['target_loss']:g}" for s in specs)
    if name == "dropout":
        return [f"{v:g}" for v in dict.fromkeys(s["model"].get("dropout", 0.0) for s in specs)]
    if name in simple:
        return [v if isinstance(v, str) else f"{v:g}" for v in every(*simple[name])]
    rhos = [s.get("optim", {}) for s in specs]
    if name == "factor of the suggested rho":
        return dict.fromkeys(f"{factor(o['rho']):g}" for o in rhos if o.get("rho"))
    if name in ("rho", "rho grid", "rho of SAM", "rho, chosen on validation"):
        if item.name == "bound" and name == "rho":
            measured = {
                f["rho"]
                for r in item.study.runs.values()
                for n, f in r.get("measured", {}).items()
                if n.startswith("bound")
            }
            return [f"{rho:g}" for rho in measured]
        found = {factor(o.get("rho", 0)) for o in rhos}
        if name == "rho, chosen on validation":
            run = next(r for r in map(item.study.runs.get, item.section.runs) if optim(r, "rho"))
            tried = item.study.candidates(run["spec"])
            found = {
                optim(min((r for r in tried if optim(r, "rho")), key=lambda r: r["metrics"]["valid_error"]), "rho")
            }
        return [f"{rho:g}" for rho in found if rho or (name == "rho" and len(found) > 2)]
    if match := re.fullmatch(r"rho grid, (.+)", name):
        names = {r["spec"]["name"] for r in item.study.runs.values()}
        return [n.rpartition("rho=")[2] for n in names if n.startswith(f"{item.name}/{match[1]}, rho=")] or None
    if name == "m":  # of all methods, also of those whose rho is not chosen yet
        plan = item.study.plan["items"].get(item.name, {"groups": {}})["groups"].values()
        rhos = [*rhos, *(spec.get("optim", {}) for group in plan for spec in variants(group))]
        return dict.fromkeys(str(o.get("m") or DEFAULTS["batch_size"]) for o in rhos if o.get("rho"))
    if match := re.fullmatch(r"rho of the measure, m = (\w+)", name):
        runs = [r for r in item.study.runs.values() if r["spec"]["name"].startswith(f"{item.name}/")]
        m = specs[0]["data"]["train_size"] if match[1] == "n" else int(match[1])
        measured = [f for r in runs for k, f in r.get("measured", {}).items() if k.startswith("sharpness")]
        rules = " ".join(item.study.plan["items"].get(item.name, {"rules": ()})["rules"])
        planned = set(re.findall(rf"([\d.]+) for m = {match[1]}\b", rules))
        return list({f"{f['rho']:g}" for f in measured if f["m"] == m} | planned) or None
    if name == "delta":
        return [
            f"{d:g}"
            for d in {
                f["delta"] for r in item.study.runs.values() for f in r.get("measured", {}).values() if "delta" in f
            }
        ]
    if name == "replicas":
        return [str(len({item.study.runs[n]["seed"] for n in item.section.runs}))]
    if name == "noise of the condition":
        draws = {
            f["stated"]["num_draws"]
            for r in item.study.runs.values()
            for f in r.get("measured", {}).values()
            if "stated" in f
        }
        return [f"{n} draws" for n in draws] + ["test images"]
    return None


def _demo_choices(item):
    """Check the table of what was tried against the means that were stored."""
    block = next(b for b in item.section.blocks if b.caption.startswith("How model, learning rate and rho"))
    for row, line in zip(block.rows, json.loads(DEMO.read_text())["sweep"], strict=True):
        where = f"{item.name}, {block.caption}, {', '.join(row[:4])}"
        expected = [f"{line['noise']:.0%}", line["network"], f"{line['lr']:g}", line["rho"] or "0"]
        item.tally.same("setting", where, row[:4], expected, 3)
        mean, half_width = row[4].split(" ± ")
        item.tally.number("mean", where, mean, line["valid_error"]["mean"])
        item.tally.number("mean, half-width", where, half_width, line["valid_error"]["half_width"])
