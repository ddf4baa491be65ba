"""What the study compares: the methods, each with its radii, and the conditions they are compared in.

Every method with a radius has five of them to choose from, on the validation split: SAM's radii times a factor,
because the strength of a correction measured on a part of the batch grows as the part shrinks: the radius of a part
starts at rho_SAM * sqrt(part).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flatmin.lab.errors import SpecError
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.studies.conditions import Condition, Method, with_rates
from flatmin.lab.studies.study import Scale
from flatmin.lab.training.step_cost import passes_per_step

RHOS = (0.1, 0.2, 0.3, 0.5, 0.8)
"""SAM's radii."""
LRS, DECAYS = (0.05, 0.1), (5e-4, 1e-3)
EPOCHS = 40
VIT_EPOCHS = 160
"""In 40 epochs the vision transformer fits neither the noisy labels nor the clean ones."""
BASE, SAM = "no SAM", "SAM"
PLAIN = "without SAM"
IN_PART = "opt.step_batch(loss_fn, batch, part=1 / {})"
IN_ASCENT = "opt.step(closure, ascent={})"
EVERY = "SAM(..., weight={0}); opt.rho = rho if step % {0} == 0 else 0"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to spend passes."""

    name: str
    family: str
    """What shares a color in the plot."""
    settings: dict[str, Any]
    """Of `Optim`, in addition to the radius."""
    code: str
    """How it is written in a training loop."""
    factor: float | None = 1.0
    """Of SAM's radii; None: no SAM."""
    epochs: float = 1.0
    """Times the epochs of training without SAM."""

    def method(self, rhos: Sequence[float]) -> Method:
        """Return it as a method with SAM's radii times its factor; the rest is what validation chose without SAM."""

        def candidates(base: Experiment) -> list[Experiment]:
            epochs = round(self.epochs * base.epochs)
            base = replace(base, epochs=epochs, evaluate_every=epochs)
            if self.factor is None:
                return [base]
            own = [round(self.factor * rho, 6) for rho in rhos]
            return [replace(base, optim=replace(base.optim, rho=rho, **self.settings)) for rho in own]

        return Method(name=self.name, candidates=candidates, after=BASE)


ARMS = (
    Arm(name="no SAM, 1.25 times the epochs", family=BASE, settings={}, code=PLAIN, factor=None, epochs=1.25),
    Arm(name="no SAM, twice the epochs", family=BASE, settings={}, code=PLAIN, factor=None, epochs=2),
    Arm(name=SAM, family="SAM", settings={}, code="opt.step(closure)"),
    Arm(name="SAM, half the epochs", family="SAM", settings={}, code="opt.step(closure)", epochs=0.5),
    Arm(
        name="SAM, m = 16",
        family="SAM, m = 16",
        settings={"m": 16},
        code="opt.step_batch(loss_fn, batch, m=16)",
        factor=0.7,
    ),
    Arm(name="part 1/4", family="part", settings={"part": 1 / 4}, code=IN_PART.format(4), factor=0.5),
    Arm(name="part 1/8", family="part", settings={"part": 1 / 8}, code=IN_PART.format(8), factor=0.35),
    Arm(name="part 1/16", family="part", settings={"part": 1 / 16}, code=IN_PART.format(16), factor=0.25),
    Arm(
        name="part 1/4 at weight 1",
        family="part at weight 1",
        settings={"part": 1 / 4, "weight": 1.0},
        code=f"SAM(..., weight=1); {IN_PART.format(4)}",
        factor=1.5,
    ),
    Arm(name="every 4th step", family="every", settings={"every": 4}, code=EVERY.format(4), factor=0.7),
    Arm(name="every 8th step", family="every", settings={"every": 8}, code=EVERY.format(8), factor=0.5),
    Arm(
        name="momentum",
        family="momentum",
        settings={"direction": "momentum"},
        code='SAM(..., direction="momentum"); opt.step(closure)',
        factor=10,
    ),
    Arm(name="ascent on 1/4", family="ascent", settings={"ascent_part": 1 / 4}, code=IN_ASCENT.format("quarter")),
    Arm(name="ascent on 1/8", family="ascent", settings={"ascent_part": 1 / 8}, code=IN_ASCENT.format("eighth")),
    Arm(name="ascent on 1/16", family="ascent", settings={"ascent_part": 1 / 16}, code=IN_ASCENT.format("sixteenth")),
)
"""All but training without SAM, whose learning rate and decay they take."""
BEST = (SAM, "part 1/8")
"""Also run at full size and without batch norm: SAM, and what keeps most of its gain below 1.13 passes."""


def conditions(scale: Scale) -> list[tuple[Condition, tuple[int, ...]]]:
    """Return the conditions with the seeds of their replicas."""
    if scale == "smoke":
        tiny = Experiment(
            data=Data(train_size=40, batch_size=20), model=Model(name="wrn-10-1"), epochs=2, precision="float32"
        )
        few = [arm for arm in ARMS if arm.name not in ("SAM, m = 16", "part 1/16")]  # a batch of 20 is too small
        return [(_condition(tiny, "digits", "clean", few, LRS[:1], DECAYS[:1]), (0, 1))]
    if scale == "paper":
        raise SpecError("cheap-sam is our own study, which is not in the paper: use --scale laptop.")
    small = _small()
    noisy = replace(small, data=replace(small.data, label_noise=0.4))
    cifar = Experiment(
        data=Data(name="cifar10", augment="basic", train_size=2000, batch_size=128),
        model=Model(name="wrn-10-2"),
        optim=Optim(),
        epochs=EPOCHS,
        evaluate_every=EPOCHS,
    )
    vit = replace(
        noisy,
        model=Model(name="vit-4-64-2"),
        optim=Optim(name="adamw", warmup_epochs=5),
        epochs=VIT_EPOCHS,
        evaluate_every=VIT_EPOCHS,
    )
    best = [arm for arm in ARMS if arm.name in BEST]
    five, ten = tuple(range(5)), tuple(range(10))
    fashion = "Fashion-MNIST, 14 x 14"
    return [
        (_condition(noisy, fashion, "40 % noisy labels", ARMS), five),
        (_condition(small, fashion, "clean labels", ARMS), ten),
        (_condition(cifar, "CIFAR-10, 32 x 32", "clean labels", best, rhos=(0.05, 0.1, 0.2)), five),
        (
            _condition(
                vit,
                f"{fashion}, ViT and AdamW",
                "40 % noisy labels",
                best,
                lrs=(1e-3, 3e-3),
                decays=(0.1, 1.0),
                rhos=(0.005, 0.01, 0.02, 0.05, 0.1),
            ),
            five,
        ),
    ]


def _small() -> Experiment:
    """Return the experiment most arms are run with: 14 x 14 pixels cost a quarter of 28 x 28."""
    return Experiment(
        data=Data(name="fashion-mnist", train_size=1000, batch_size=128, image_size=14),
        model=Model(name="wrn-10-2"),
        optim=Optim(),
        epochs=EPOCHS,
        evaluate_every=EPOCHS,
    )


def _condition(
    start: Experiment,
    label: str,
    column: str,
    arms: Sequence[Arm],
    lrs: Sequence[float] = LRS,
    decays: Sequence[float] = DECAYS,
    rhos: Sequence[float] = RHOS,
) -> Condition:
    candidates: Callable[[Experiment], Sequence[Experiment]] = with_rates(lrs, decays)
    methods = (Method(name=BASE, candidates=candidates), *(arm.method(rhos) for arm in arms))
    return Condition(labels=(label,), column=column, start=start, methods=methods, claimed={})


def cost_in_passes(experiment: Experiment, epochs: int) -> float:
    """Return the passes over the training set relative to training without SAM for the given number of epochs.

    Example:
        >>> cost_in_passes(Experiment(optim=Optim(rho=0.1, part=1 / 8), epochs=40), 40)
        1.125
        >>> cost_in_passes(Experiment(optim=Optim(rho=0.1), epochs=20), 40)
        1.0
    """
    return passes_per_step(experiment) * experiment.epochs / epochs
