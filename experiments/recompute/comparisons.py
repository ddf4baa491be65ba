"""Two samples that are paired by seed, and the sentences that print what comes of them. Imports nothing of flatmin."""

import math
import re
from dataclasses import dataclass, field

from recompute.page import interval
from recompute.runs import SIGNIFICANT, at_loss, optim, paired_p

P_VALUE = r"p [=<] \d\.\d+|no test"
MEASURED = re.compile(r"(-?[\d.e+-]+(?: ± [\d.e+-]+)?)(?: %| points)? \(n = (\d+)(?:; (.*))?\)")
COMPARED = re.compile(
    rf"([+-]?[\d.]+ ± [\d.]+)(?: points)? \((.+?) - (.+), (\d+) pairs?; ({P_VALUE}), Holm ({P_VALUE})\)"
)
OVER_PAIRS = re.compile(
    rf"([+-][\d.]+) ± ([\d.]+) (?:points|nats) over (\d+) pairs, ({P_VALUE})"
    r"(?: \(Holm's correction for (\d+) comparisons(?:, open until the (\d+) missing ones are available)?\))?\."
)
AGAINST = re.compile(
    r"([^;]+?): (-?[\d.e+-]+) \(((?:[^()]|\([^()]*\))*)\) vs\. (-?[\d.e+-]+) \(((?:[^()]|\([^()]*\))*)\); "
    rf"difference (-?[\d.e+-]+) ± ([\d.e+-]+), n = (\d+), ({P_VALUE})"
)
PARTIAL = re.compile(
    r"([^;]+?): (-?[\d.e+-]+) \(((?:[^()]|\([^()]*\))*)\) vs\. (-?[\d.e+-]+) \(((?:[^()]|\([^()]*\))*)\); "
    r"(\d+) of (\d+) pairs are available, nothing is judged before all are"
)
UNTESTABLE = re.compile(r"([^;]+?): not a test at this scale: ([^;]+?)(?=;|\.$)")
NO_PAIR = re.compile(r"([^;]+?): no pair of runs of (.+?) and (.+?) is available")
CLAIM = re.compile(r"(.+?): (.+) has a lower (.+?) than (.+?)\.( \(ours\))?")
METRICS = {"test error": "test_error", "test loss": "test_loss", "calibration error": "test_ece"}
PLANNED = re.compile(r"(.+): (test error|test loss|calibration error): (.+) vs\. (.+?)( \(ours\))?")


@dataclass
class Entry:
    """A measured number of a table with the runs behind it."""

    caption: str
    row: list[str]
    column: str
    label: str
    runs: list[dict]
    notes: list[str]

    @property
    def is_incomplete(self):
        """Whether it says that replicas are missing."""
        return any("available" in note or "failed" in note for note in self.notes)

    def values(self, read):
        """Return a number of each run by seed."""
        return {run["seed"]: read(run) for run in self.runs}


@dataclass
class Comparison:
    """Two samples, paired by seed: the first is claimed to be lower."""

    names: tuple[str, str]
    low: dict[int, float] = field(default_factory=dict)
    high: dict[int, float] = field(default_factory=dict)
    runs: list[dict] = field(default_factory=list)
    condition: str = ""
    metric: str = "test error"
    """What is compared, in the page's words."""
    one_sided: bool = False
    ours: bool = False
    p_holm: float = math.nan
    p_best: float = math.nan
    family: int = 1
    waiting: int = 0
    gated: bool = False
    """Whether its gate says that it is no test at this scale."""
    untestable: str = ""
    """Why its runs are no test, as the page says it."""
    asked: int = 2
    """With fewer pairs nothing is tested."""

    @property
    def seeds(self):
        """The seeds that both have."""
        return sorted(self.low.keys() & self.high.keys())

    @property
    def differences(self):
        """The first minus the second."""
        return [self.low[seed] - self.high[seed] for seed in self.seeds]

    @property
    def p(self):
        """The p-value of the paired t-test."""
        if len(self.seeds) < max(2, self.asked):
            return math.nan
        both = paired_p([self.low[s] for s in self.seeds], [self.high[s] for s in self.seeds])
        if not self.one_sided:
            return both
        return both / 2 if interval(self.differences)[0] < 0 else 1 - both / 2

    @property
    def is_open(self):
        """Whether comparisons that wait for runs may still make it significant."""
        return not math.isnan(self.p) and self.p_best < SIGNIFICANT <= self.p_holm

    @property
    def status(self):
        """What it says of its claim."""
        if self.untestable or self.gated:
            return "not tested at this scale"
        if math.isnan(self.p_holm) or self.is_open:
            return "not tested"
        if self.p_holm >= SIGNIFICANT:
            return "inconclusive"
        return "reproduced" if interval(self.differences)[0] < 0 else "not reproduced"


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
