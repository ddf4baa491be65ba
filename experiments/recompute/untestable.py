"""Which comparisons of figures are no test at this scale, and why. Imports nothing of flatmin."""

import re

from recompute.runs import at_loss, optim

MOST_TRAIN_ERROR, MOST_NOISY_TRAIN_ERROR = 2.0, 5.0
"""The largest training error, in %, of a baseline; the second with noisy labels."""
AUGMENTED = {"without augmentation": "none", "basic augmentation": "basic"}


def why_untestable(item, what):
    """Return why a comparison of a quantity is no test, as a page says it; nothing if it is one.

    At a training loss: a run never falls below it. At the end, and with noisy labels: the baseline does not fit.
    """
    if match := re.fullmatch(r"log10 of lambda_max at a training loss of ([\d.]+), (.+)", what):
        said = []
        for method in ("SGD", "SAM"):
            runs = _runs(item, f"hessian/{AUGMENTED[match[2]]}/{method}")
            never = sum(at_loss(run, float(match[1])) is None for run in runs)
            said += [f"the loss of {never} of {len(runs)} runs of {method} never falls below {match[1]}"] * (never > 0)
        return " and ".join(said)
    if match := re.fullmatch(r"lambda_max(?:/lambda_5)? at the end, (.+)", what):
        error = _train_error(_runs(item, f"hessian/{AUGMENTED[match[1]]}/SGD"))
        said = f"SGD ends with a training error of {error:.1f} %, above {MOST_TRAIN_ERROR:g} %"
        return said if error > MOST_TRAIN_ERROR else ""
    if match := re.fullmatch(r"validation error, (\d+ %) noise, %", what):
        error = _train_error([run for run in _runs(item, f"noise-and-rho/{match[1]}/") if not optim(run, "rho")])
        said = f"without SAM the training error ends at {error:.1f} %, above {MOST_NOISY_TRAIN_ERROR:g} %"
        return said if error > MOST_NOISY_TRAIN_ERROR else ""
    return ""


def _runs(item, name):
    return [run for run in item.study.runs.values() if run["spec"]["name"].startswith(name)]


def _train_error(runs):
    return 100 * sum(run["metrics"]["train_error"] for run in runs) / len(runs)
