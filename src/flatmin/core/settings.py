"""The settings of SAM that do not change while it trains."""

from dataclasses import dataclass
from typing import Literal

from flatmin.core.checks import check_adaptive, check_ascent_steps, check_combine, check_p, check_weight
from flatmin.core.step_functions import CombineFunction, DirectionFunction

Direction = Literal["gradient", "random", "momentum"] | DirectionFunction


@dataclass(frozen=True)
class Settings:
    """How SAM finds its perturbation and what it makes of the gradient there."""

    p: float
    eta: float | None
    """ASAM's eta; None is plain SAM."""
    ascent_steps: int
    direction: Direction
    weight: float | None
    combine: CombineFunction | None
    sync_perturbation: bool

    @classmethod
    def checked(
        cls,
        *,
        p: float,
        adaptive: bool | float,
        ascent_steps: int,
        direction: Direction,
        weight: float | None,
        combine: CombineFunction | None,
        sync_perturbation: bool,
    ) -> "Settings":
        """Return the settings, or raise for one that is out of its range or does not go with another."""
        p = check_p(p)
        if direction == "momentum" and (weight not in (None, 1) or combine is not None):
            given = f"weight={weight!r}" if combine is None else f"combine={combine!r}"
            raise ValueError(
                f'direction="momentum" takes one pass, at w + eps, so there is nothing to mix: {given} '
                "does not go with it. Leave it at None."
            )
        return cls(
            p=p,
            eta=check_adaptive(adaptive),
            ascent_steps=check_ascent_steps(ascent_steps, p, direction),
            direction=direction,
            weight=check_weight(weight),
            combine=check_combine(combine, weight),
            sync_perturbation=sync_perturbation,
        )

    @property
    def follows_gradient(self) -> bool:
        """Whether the direction comes from the gradient at w: it is the gradient, or a function of it."""
        return self.direction == "gradient" or callable(self.direction)

    @property
    def mixes_gradients(self) -> bool:
        """Whether a step on all examples uses the gradient at w next to the gradient at w + eps."""
        return self.combine is not None or self.correction_weight() != 1.0

    def correction_weight(self, share: float = 1.0) -> float:
        """Return the factor c of the correction g(w + eps) - g(w), measured on a share of the examples.

        By default SAM keeps its strength: 1 / share.
        """
        return 1 / share if self.weight is None else self.weight
