"""The models of Figure 3, right: settings, how they are trained to one loss, and what is measured of them."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from flatmin.lab.foret2021.scales import smoke
from flatmin.lab.runs.record import RunRecord
from flatmin.lab.spec.experiment import Augment, Data, Experiment, Model, Optim
from flatmin.lab.studies.study import Known, Scale
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.measurements import Sharpness
from flatmin.lab.training.schedule import DECAYED, TOLERANCE

SEEDS = (0, 1)
"""Of each setting; their means count."""
TRAIN_SIZE, IMAGE_SIZE, TARGET_LOSS = 500, 14, 0.05
RHOS: Mapping[int | None, float] = {1: 0.04, 4: 0.054, 16: 0.099, 64: 0.18, 256: 0.26, None: 0.29}
"""What flatmin.suggest_rho says for m before training, on a laptop: the mean of WRN-10-2 and WRN-16-2, one seed, on
images without augmentation."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The hyperparameters of a model."""

    width: int
    depth: int
    batch_size: int
    weight_decay: float
    dropout: float
    augment: Augment
    lr: float

    @property
    def values(self) -> tuple[float | str, ...]:
        """All of them: what two models may share."""
        return tuple(vars(self).values())

    @property
    def name(self) -> str:
        """Its display name."""
        return (
            f"width {self.width}, depth {self.depth}, batch size {self.batch_size}, "
            f"weight decay {self.weight_decay:g}, dropout {self.dropout:g}, augmentation {self.augment}, "
            f"learning rate {self.lr:g}"
        )


@dataclass(frozen=True, kw_only=True)
class Zoo:
    """Models, when to stop each of them, and what to measure."""

    settings: list[Setting]
    target_loss: float
    band: tuple[float, float] = (-math.inf, math.inf)
    """In which the evaluated training loss of a model that counts lies."""
    most_lr: float = 1.0
    """The learning rate at the end of a model that counts, at most, in units of its peak."""
    epochs: Mapping[Augment, int]
    """At most; a model that augments takes longer."""
    rhos: Mapping[int | None, float]
    """The radius of each m-sharpness, by m; None is the whole training set."""
    least: int
    """With fewer settings that count nothing is tested."""


def laptop_settings() -> list[Setting]:
    """Return the settings of a laptop: half of all combinations, in which every two values meet equally often.

    Of the six hyperparameters with two values an even number has the second: no set of fewer than six of them is
    confounded. The learning rate has three.
    """
    two: list[tuple[object, object]] = [(1, 2), (10, 16), (16, 48), (0.0, 1e-3), (0.0, 0.2), ("none", "flip")]
    names = ("width", "depth", "batch_size", "weight_decay", "dropout", "augment")
    chosen = [which for which in itertools.product((0, 1), repeat=len(two)) if sum(which) % 2 == 0]
    return [
        Setting(**{n: pair[i] for n, pair, i in zip(names, two, which, strict=True)}, lr=lr)  # type: ignore[arg-type]
        for which in chosen
        for lr in (0.04, 0.08, 0.16)
    ]


ZOOS: dict[Scale, Zoo] = {
    "laptop": Zoo(
        settings=laptop_settings(),
        target_loss=TARGET_LOSS,
        band=(round((1 - TOLERANCE) * TARGET_LOSS, 9), round((1 + TOLERANCE) * TARGET_LOSS, 9)),
        most_lr=DECAYED,
        epochs={"none": 60, "flip": 80},
        rhos=RHOS,
        least=72,
    ),
    "smoke": Zoo(
        settings=[
            Setting(width=w, depth=10, batch_size=20, weight_decay=0.0, dropout=dropout, augment="none", lr=lr)
            for w in (1, 2)
            for dropout in (0.0, 0.2)
            for lr in (0.05, 0.1)
        ],
        target_loss=100.0,
        epochs={"none": 1},
        rhos={4: 0.05, None: 0.1},
        least=2,
    ),
}


@dataclass(frozen=True)
class Member:
    """A setting that counts: means over its models."""

    setting: Setting
    runs: tuple[str, ...]
    gap: float
    """Test error minus training error, in points."""
    loss: float
    """On the training set, where the sharpness was measured."""
    sharpness: Mapping[int | None, float]
    """By m; None is the whole training set."""


def zoo_experiment(scale: Scale, setting: Setting) -> Experiment:
    """Return how a model is trained."""
    zoo = ZOOS[scale]
    epochs = zoo.epochs[setting.augment]
    images = Data(name="fashion-mnist", train_size=TRAIN_SIZE, image_size=IMAGE_SIZE)
    base = smoke("wrn-10-1").data if scale == "smoke" else images
    return Experiment(
        name=f"predictive/{setting.name}",
        data=replace(base, batch_size=setting.batch_size, augment=setting.augment),
        model=Model(name=f"wrn-{setting.depth}-{setting.width}", dropout=setting.dropout),
        # Constant: when the learning rate decays is decided by the loss.
        optim=Optim(lr=setting.lr, weight_decay=setting.weight_decay, schedule="constant"),
        epochs=epochs,
        evaluate_every=epochs,
        target_loss=zoo.target_loss,
    )


def zoo_jobs(scale: Scale) -> dict[tuple[str, ...], list[Job]]:
    """Return the models by augmentation and seed: in a group only hyperparameters differ."""
    zoo = ZOOS[scale]
    measurements = tuple(sharpness_measurements(zoo).values())
    return {
        (f"augmentation {augment}", f"seed {seed}"): [
            Job(experiment=zoo_experiment(scale, setting), seed=seed, measurements=measurements)
            for setting in zoo.settings
            if setting.augment == augment
        ]
        for augment in zoo.epochs
        for seed in SEEDS
    }


def sharpness_measurements(zoo: Zoo) -> dict[int | None, Sharpness]:
    """Return how m-sharpness is measured, by m; None is the whole training set."""
    return {m: Sharpness(rho=rho, m=m) for m, rho in zoo.rhos.items()}


def counts(record: RunRecord, zoo: Zoo, peak: float) -> bool:
    """Return whether a model was stopped in the band around the target loss, after the learning rate had decayed.

    ``peak`` is the learning rate that it started with. A model with a sharpness that is not finite does not count.
    """
    if record.state != "finished" or any(m.name not in record.measured for m in sharpness_measurements(zoo).values()):
        return False
    loss, lr = record.metrics.get("fit_loss"), record.metrics.get("lr")
    if loss is None or lr is None or not all(math.isfinite(s) for s in _sharpness(record, zoo).values()):
        return False
    return zoo.band[0] <= loss <= zoo.band[1] and lr <= zoo.most_lr * peak * (1 + 1e-9)


def members(scale: Scale, known: Known) -> list[Member]:
    """Return the settings both of whose models count, each with the means over them."""
    zoo = ZOOS[scale]
    found = []
    for setting in zoo.settings:
        experiment = zoo_experiment(scale, setting)
        records = [known[experiment.run_name(seed)] for seed in SEEDS]
        if not all(counts(record, zoo, setting.lr) for record in records):
            continue
        sharpness = [_sharpness(record, zoo) for record in records]
        found.append(
            Member(
                setting,
                tuple(record.name for record in records),
                fmean(100 * (_metric(r, "test_error") - _metric(r, "fit_error")) for r in records),
                fmean(_metric(r, "fit_loss") for r in records),
                {m: fmean(of_run[m] for of_run in sharpness) for m in zoo.rhos},
            )
        )
    return found


def _sharpness(record: RunRecord, zoo: Zoo) -> dict[int | None, float]:
    measured = sharpness_measurements(zoo)
    return {m: float(record.measured[how.name]["m_sharpness"]) for m, how in measured.items()}


def _metric(record: RunRecord, name: str) -> float:
    return float(record.metrics[name] or 0.0)
