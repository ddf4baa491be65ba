"""What the study compares: the methods, each with its radii, and the conditions they are compared in.

Every method with a radius has five of them to choose from, on the validation split: SAM's radii times a factor,
because the strength of a correction measured on a part of the batch grows as the part shrinks: the radius of a part
starts at rho_SAM * sqrt(part).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from flatmin.lab.errors import SpecError
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim, passes_per_step
from flatmin.lab.studies.conditions import Condition, Method, with_rates
from flatmin.lab.studies.study import Scale

RHOS = (0.1, 0.2, 0.3, 0.5, 0.8)
"""SAM's radii."""
LRS, DECAYS = (0.05, 0.1), (5e-4, 1e-3)
EPOCHS = 40
VIT_EPOCHS = 160
"""In 40 epochs the vision transformer fits neither the noisy labels nor the clean ones."""
BASE, SAM = "no SAM", "SAM"
PLAIN = "without SAM"
IN_PART = "opt.step_batch(loss_fn, batch, part=1 / {})"
AT_WEIGHT_1 = f"SAM(..., weight=1); {IN_PART.format(4)}"
IN_ASCENT = "opt.step(closure, ascent={})"
EVERY = "SAM(..., weight={0}); opt.rho = rho if step % {0} == 0 else 0"


class Arm(NamedTuple):
    """One way to spend passes."""

    name: str
    family: str
    """What shares a color in the plot."""
    factor: float | None
    """Of SAM's radii; None: no SAM."""
    settings: dict[str, Any]
    """Of `Optim`, in addition to the radius."""
    code: str
    """How it is written in a training loop."""
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
    Arm("no SAM, 1.25 times the epochs", BASE, None, {}, PLAIN, epochs=1.25),
    Arm("no SAM, twice the epochs", BASE, None, {}, PLAIN, epochs=2),
    Arm(SAM, "SAM", 1.0, {}, "opt.step(closure)"),
    Arm("SAM, half the epochs", "SAM", 1.0, {}, "opt.step(closure)", epochs=0.5),
    Arm("SAM, m = 16", "SAM, m = 16", 0.7, {"m": 16}, "opt.step_batch(loss_fn, batch, m=16)"),
    Arm("part 1/4", "part", 0.5, {"part": 1 / 4}, IN_PART.format(4)),
    Arm("part 1/8", "part", 0.35, {"part": 1 / 8}, IN_PART.format(8)),
    Arm("part 1/16", "part", 0.25, {"part": 1 / 16}, IN_PART.format(16)),
    Arm("part 1/4 at weight 1", "part at weight 1", 1.5, {"part": 1 / 4, "weight": 1.0}, AT_WEIGHT_1),
    Arm("every 4th step", "every", 0.7, {"every": 4}, EVERY.format(4)),
    Arm("every 8th step", "every", 0.5, {"every": 8}, EVERY.format(8)),
    Arm("momentum", "momentum", 10, {"direction": "momentum"}, 'SAM(..., direction="momentum"); opt.step(closure)'),
    Arm("ascent on 1/4", "ascent", 1.0, {"ascent_part": 1 / 4}, IN_ASCENT.format("quarter")),
    Arm("ascent on 1/8", "ascent", 1.0, {"ascent_part": 1 / 8}, IN_ASCENT.format("eighth")),
    Arm("ascent on 1/16", "ascent", 1.0, {"ascent_part": 1 / 16}, IN_ASCENT.format("sixteenth")),
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
    small = Experiment(  # 14 x 14 pixels cost a quarter of 28 x 28
        data=Data(name="fashion-mnist", train_size=1000, batch_size=128, image_size=14),
        model=Model(name="wrn-10-2"),
        epochs=EPOCHS,
        evaluate_every=EPOCHS,
    )
    noisy = replace(small, data=replace(small.data, label_noise=0.4))
    cifar = replace(small, data=Data(name="cifar10", augment="basic", train_size=2000, batch_size=128))
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


def _condition(
    start: Experiment,
    label: str,
    column: str,
    arms: Sequence[Arm],
    lrs: Sequence[float] = LRS,
    decays: Sequence[float] = DECAYS,
    rhos: Sequence[float] = RHOS,
) -> Condition:
    methods = (Method(name=BASE, candidates=with_rates(lrs, decays)), *(arm.method(rhos) for arm in arms))
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
