"""The optimizer of a run: base optimizer, schedule and SAM. Every field is a flag of ``flatmin train``."""

import math
from dataclasses import dataclass
from typing import Literal

from flatmin.core.checks import FIND_RHO, check_p, check_rho
from flatmin.lab.errors import SpecError
from flatmin.lab.spec.fields import conform, require

SAM_ONLY = (
    *("adaptive", "sync_perturbation", "second_order", "ascent_steps", "direction"),
    *("p", "part", "ascent_part", "every", "weight", "perturb"),
)
"""The fields of `Optim` that mean nothing without SAM."""
AUTO = "auto"
NO_SAM = "left alone where rho is 0: without SAM it has no meaning"
ONE_PASS = "left alone where direction is momentum, whose step is one pass"
FIRST_ORDER = (
    "false with m, sync_perturbation, adaptive, part, every, weight, perturb, momentum, several ascent steps, or p "
    "other than 2 and inf"
)


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer, its schedule, and SAM around it."""

    name: Literal["sgd", "adamw"] = "sgd"
    """The base optimizer."""
    lr: float = 0.1
    """Peak learning rate."""
    momentum: float = 0.9
    """SGD's momentum (AdamW has betas 0.9 and 0.999)."""
    nesterov: bool = True
    """SGD with Nesterov's momentum (the reference code)."""
    weight_decay: float = 5e-4
    """lambda of the L2 term lambda/2 |w|^2, on all parameters (AdamW: decoupled)."""
    decay: Literal["optimizer", "loss"] = "optimizer"
    """optimizer: decay outside of the perturbation (Eq. 1); loss: in the loss (the reference code)."""
    schedule: Literal["cosine", "step", "constant"] = "cosine"
    """The learning rate after warm-up; step multiplies it by 0.2 after 30, 60 and 80 % of all steps."""
    warmup_epochs: float = 0.0
    """Epochs over which the learning rate rises linearly from 0."""
    label_smoothing: float = 0.0
    """Mass of the target that is spread over all classes."""
    clip_norm: float | None = None
    """Clip the norm of the synchronized gradient of the base step (reference code: 5.0)."""
    rho: float | str = 0.0
    """SAM's neighborhood size (the paper's default is 0.05); 0 trains without SAM; auto is what flatmin.suggest_rho
    finds before the first step on training batches, and 0.5x is half of that."""
    p: float = 2.0
    """The norm of SAM's ball, in [1, inf]."""
    adaptive: float | None = None
    """ASAM with this eta; plain SAM if None."""
    ascent_steps: int = 1
    """Steps of the inner maximization (Appendix C.6)."""
    direction: Literal["gradient", "random", "momentum"] = "gradient"
    """random perturbs along Gaussian noise (Appendix C.5); momentum against the momentum, in one pass."""
    part: float = 1.0
    """Apply SAM to this share of each batch, at full strength, and take a plain pass on the rest: 1 + part passes."""
    ascent_part: float = 1.0
    """Take the direction from this share of each batch alone, and the gradient at w + eps from all of it."""
    every: int = 1
    """SAM in every k-th step, plain steps in between."""
    weight: float | None = None
    """Factor of SAM's correction g(w + eps) - g(w); full strength if None: every / part."""
    perturb: Literal["all", "norm"] = "all"
    """norm: SAM perturbs the parameters of normalization layers only (SAM-ON); all are trained."""
    m: int | None = None
    """Examples that batch norm sees together and that, with SAM, share an eps (m-sharpness, Section 4.1), as if on a
    separate accelerator; all of a worker's if None."""
    sync_perturbation: bool = False
    """One eps for all workers (the default is one each, as in the paper)."""
    second_order: bool = False
    """Keep the second-order terms of SAM's gradient (Appendix C.4)."""

    def __post_init__(self) -> None:
        conform(self)
        if isinstance(self.rho, str):
            object.__setattr__(self, "rho", _factor_name(self.rho))  # one name for one factor: it is one run
        for name, check in (("rho", check_rho), ("p", check_p)):
            value = getattr(self, name)
            try:
                check(value if isinstance(value, float) else 0.0)
            except ValueError as error:
                said = str(error).replace(FIND_RHO, "auto measures the scale.")
                raise SpecError(f"optim.{name}: {said}") from None
        one_ascent, ascent = self.ascent_steps == 1, self.direction == "gradient"
        cheap = self.part < 1 or self.every > 1 or self.weight not in (None, 1)
        alone = ascent and not cheap and self.m is None and one_ascent
        plain = self.m is None and not self.sync_perturbation and self.adaptive is None
        plain = plain and not cheap and self.ascent_part == 1 and self.direction != "momentum" and self.perturb == "all"
        exact = plain and one_ascent and self.p in (2, math.inf)
        finite = self.weight is None or (self.weight >= 0 and math.isfinite(self.weight))
        require(
            self,
            ("lr", 0 < self.lr <= 1e30, "positive and at most 1e30"),
            ("momentum", 0 <= self.momentum < 1, "in [0, 1)"),
            ("nesterov", self.name != "sgd" or not self.nesterov or self.momentum > 0, "false where momentum is 0"),
            ("weight_decay", 0 <= self.weight_decay <= 1e6, "at least 0 and at most 1e6"),
            ("warmup_epochs", self.warmup_epochs >= 0, "at least 0"),
            ("label_smoothing", 0 <= self.label_smoothing < 1, "in [0, 1)"),
            ("clip_norm", self.clip_norm is None or self.clip_norm > 0, "positive, or None"),
            ("rho", self.rho_number <= 1e30, "at most 1e30"),
            ("rho", self.rho_factor is None or self.direction != "momentum", "a number where direction is momentum"),
            ("adaptive", self.adaptive is None or 0 <= self.adaptive <= 1e6, "at least 0 and at most 1e6, or None"),
            ("ascent_steps", self.ascent_steps >= 1, "at least 1"),
            ("ascent_steps", one_ascent or self.p in (1, 2, math.inf), "1 where p is not 1, 2 or inf"),
            ("ascent_steps", one_ascent or ascent, "1 where direction is random or momentum"),
            ("part", 0 < self.part <= 1, "in (0, 1]"),
            ("ascent_part", 0 < self.ascent_part <= 1, "in (0, 1]"),
            ("every", self.every >= 1, "at least 1"),
            ("weight", finite, "finite and not negative, or None for full strength"),
            ("direction", self.direction != "momentum" or not (cheap or self.ascent_part < 1), ONE_PASS),
            ("ascent_part", self.ascent_part == 1 or alone, "1 with part, every, weight, m or another ascent"),
            ("m", self.m is None or self.m >= 1, "at least 1, or None"),
            ("m", self.m is None or not self.sync_perturbation, "None where sync_perturbation is true"),
            *((name, self.uses_sam or getattr(self, name) == getattr(Optim, name), NO_SAM) for name in SAM_ONLY),
            ("second_order", not self.second_order or exact, FIRST_ORDER),
        )

    @property
    def uses_sam(self) -> bool:
        """Whether steps are SAM's."""
        return self.rho != 0

    @property
    def rho_factor(self) -> float | None:
        """By what the suggested radius is multiplied; None if rho is a number."""
        return None if isinstance(self.rho, float) else 1.0 if self.rho == AUTO else float(self.rho.removesuffix("x"))

    @property
    def rho_number(self) -> float:
        """The radius, or the factor of the suggested one."""
        return self.rho if isinstance(self.rho, float) else self.rho_factor or 1.0

    @property
    def rho_text(self) -> str:
        """The radius in words: 0.05, auto, 0.5x."""
        return f"{self.rho:g}" if isinstance(self.rho, float) else self.rho


def _factor_name(rho: str) -> str:
    """Return the shortest name of a factor: 0.5x for 0.50x, auto for 1x."""
    try:
        factor = 1.0 if rho == AUTO else float(rho.removesuffix("x")) if rho.endswith("x") else math.nan
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise SpecError(f"optim.rho must be a radius, auto, or a positive factor of it such as 0.5x; got {rho!r}.")
    return AUTO if factor == 1 else f"{factor:.12g}x"
