"""The settings of SAM, and checks of what users pass in: each error names the argument, the value and the fix."""

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from flatmin.core.step_functions import CombineFunction, DirectionFunction

Closure = Callable[[], Any]
Direction = Literal["gradient", "random", "momentum"] | DirectionFunction

DEFAULT_ETA = 0.01  # Kwon et al. (2021)
FIND_RHO = "To find the scale: opt.rho = flatmin.suggest_rho(opt, loss_fn, loader).rho."
LIGHTNING_HINT = (
    " In Lightning: with manual optimization, run the second pass inside `with opt.perturbed():` before opt.step(); a "
    "training_step may return None only with flatmin.integrations.lightning.SAMCallback, which skips the batch."
)
MIGRATION = (
    "Write SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=0.05, model=model), and "
    "opt.step(closure), or two visible passes with `with opt.perturbed():`. See the docs, page Migrating."
)


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


def check_p(p: float) -> float:
    """Return p as a float, or raise if there is no p-norm of that name."""
    if not _is_number(p):
        raise TypeError(f"p must be a number in [1, inf], got {p!r} of type {type(p).__name__}.")
    if not p >= 1:
        raise ValueError(f"p must be in [1, inf], got {p!r}: below 1 there is no norm. The paper's default is p=2.")
    return float(p)


def check_rho(rho: float, name: str = "rho") -> float:
    """Return rho as a float, or raise if it is not the radius of a ball."""
    if not _is_number(rho):
        raise TypeError(f"{name} must be a number, got {rho!r} of type {type(rho).__name__}. {FIND_RHO}")
    if not (rho >= 0 and math.isfinite(rho)):
        raise ValueError(
            f"{name} must be finite and not negative, got {rho!r}. Good values are 0.01 to 0.5. {FIND_RHO}"
        )
    return float(rho)


def check_adaptive(adaptive: bool | float) -> float | None:
    """Return ASAM's eta, or None for plain SAM."""
    if isinstance(adaptive, bool):
        return DEFAULT_ETA if adaptive else None
    if not _is_number(adaptive):
        raise TypeError(f"adaptive must be a bool or ASAM's eta, a number, got {adaptive!r}.")
    if not (adaptive >= 0 and math.isfinite(adaptive)):
        raise ValueError(f"adaptive, as ASAM's eta, must be finite and not negative, got {adaptive!r}. Try 0.01.")
    return float(adaptive)


def check_ascent_steps(ascent_steps: int, p: float, direction: object) -> int:
    """Return the number of ascent steps, or raise where there is no such ascent."""
    if not callable(direction) and direction not in ("gradient", "random", "momentum"):
        raise ValueError(f'direction must be "gradient", "random", "momentum" or a function, got {direction!r}.')
    if isinstance(direction, type):
        raise TypeError(f"direction is the class {direction.__name__}. Pass an instance: {direction.__name__}(...).")
    if isinstance(ascent_steps, bool) or not isinstance(ascent_steps, int):
        raise TypeError(f"ascent_steps must be a whole number, got {ascent_steps!r}.")
    if ascent_steps < 1:
        raise ValueError(f"ascent_steps must be at least 1, got {ascent_steps}. For no ascent at all use rho=0.")
    if ascent_steps > 1 and p not in (1, 2, math.inf):
        raise ValueError(
            f"ascent_steps={ascent_steps} with p={p}: several steps are projected onto the ball, which is implemented "
            "for p = 1, 2 and inf. Choose one of them, or ascent_steps=1."
        )
    if ascent_steps > 1 and direction in ("random", "momentum"):
        raise ValueError(
            f'ascent_steps={ascent_steps} with direction="{direction}": only the gradient changes from step to step. '
            'Use ascent_steps=1, or direction="gradient".'
        )
    return ascent_steps


def check_weight(weight: float | None) -> float | None:
    """Return the factor of the correction, None for full strength, or raise."""
    if weight is None:
        return None
    if not _is_number(weight):
        raise TypeError(f"weight must be a number or None, got {weight!r} of type {type(weight).__name__}.")
    if not (weight >= 0 and math.isfinite(weight)):
        raise ValueError(
            f"weight must be finite and not negative, got {weight!r}. None is full strength; 0 is the base optimizer."
        )
    return float(weight)


def check_combine(combine: Any, weight: float | None, direction: object) -> Any:
    """Return the function that combines both gradients, or raise for one that cannot."""
    if direction == "momentum" and (weight not in (None, 1) or combine is not None):
        given = f"weight={weight!r}" if combine is None else f"combine={combine!r}"
        raise ValueError(
            f'direction="momentum" takes one pass, at w + eps, so there is nothing to mix: {given} '
            "does not go with it. Leave it at None."
        )
    if combine is not None and (not callable(combine) or isinstance(combine, type)):
        raise TypeError(
            f"combine must be a function of two lists of gradients, or None, got {combine!r}. Pass an instance of a "
            "class, not the class."
        )
    if combine is not None and weight is not None:
        raise ValueError(
            f"combine and weight={weight!r} both define how the gradients at w and at w + eps are combined. Pass one: "
            "weight=c is g + c * (g_eps - g)."
        )
    return combine


def check_closures(closures: Any) -> list[Closure]:
    """Return the closures of several micro-batches, or raise for what is neither a function nor a list of them."""
    if isinstance(closures, Tensor) or not isinstance(closures, Iterable):
        loss = " Did you pass the loss? SAM has to compute it twice." if isinstance(closures, Tensor) else ""
        raise TypeError(
            f"closure must be a function that zeroes the gradients, computes the loss, calls backward() and returns "
            f"the loss, or a list of such functions; got {type(closures).__name__}.{loss}"
        )
    return list(closures)


def check_base(base: Any) -> None:
    """Raise unless it is an optimizer that steps on gradients it is given."""
    if not isinstance(base, Optimizer | type) and isinstance(base, Iterable):
        raise TypeError(
            f"base must be a built optimizer, got {type(base).__name__}: SAM wraps an optimizer instead of taking "
            f"parameters and a class. {MIGRATION}"
        )
    if isinstance(base, type):
        raise TypeError(
            f"base must be a built optimizer, got the class {base.__name__}. "
            f"Build it first: SAM(torch.optim.{base.__name__}(model.parameters(), lr=...), rho=...)."
        )
    if not isinstance(base, Optimizer):
        raise TypeError(
            f"base must be a torch.optim.Optimizer, got {type(base).__module__}.{type(base).__qualname__}. Build one: "
            "SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=0.05)."
        )
    closure = inspect.signature(base.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"base is {type(base).__name__}, whose step() calls the closure itself, any number of times: SAM "
            "cannot hand it one gradient. Use an optimizer that steps on given gradients, such as SGD or AdamW."
        )


def shares_of(closures: Sequence[Closure], rest: Closure | None, weights: Sequence[float] | None) -> list[float]:
    """Return the weights of micro-batches, and of the rest if there is one, scaled to sum to 1."""
    if not closures or not all(callable(closure) for closure in closures):
        raise TypeError("closure must be a function or a non-empty list of functions.")
    if rest is not None and not callable(rest):
        raise TypeError(f"rest must be a function like the closures, got {type(rest).__name__}.")
    if weights is None and rest is None:
        return [1 / len(closures)] * len(closures)
    if weights is None:
        raise ValueError(
            "rest needs weights: how many examples each closure has, and the rest last, such as weights=[16, 112]."
        )
    values = [float(weight) for weight in weights]
    count = len(closures) + (rest is not None)
    if len(values) != count:
        last = " and one for the rest" if rest is not None else ""
        raise ValueError(f"weights has {len(values)} entries for {len(closures)} closures; give one each{last}.")
    if not all(math.isfinite(v) and v >= 0 for v in values) or sum(values[: len(closures)]) == 0:
        raise ValueError(f"weights must be finite, not negative and not all 0, got {values}.")
    if rest is not None and values[-1] == 0:
        raise ValueError(f"The weight of `rest` must be positive, got {values}; omit `rest` instead.")
    return [value / sum(values) for value in values]


def check_generator(generator: torch.Generator | None) -> torch.Generator | None:
    """Return it, or raise if it is neither a generator nor None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator or None, got {generator!r}. "
            "For a seed, pass torch.Generator().manual_seed(seed)."
        )
    return generator


def keep_loss(loss: Any) -> Tensor:
    """Return a closure's loss, detached and safe from what later passes overwrite (CUDA graphs do), or raise."""
    if not isinstance(loss, Tensor | numbers.Real):
        raise TypeError(
            f"The closure returned {_kind(loss)}: it must return the loss, after calling backward() on it."
            + (" Return outputs['loss'], say." if isinstance(loss, Mapping) else "")
            + (LIGHTNING_HINT if loss is None else "")
        )
    value = torch.as_tensor(loss)
    if value.numel() != 1:
        raise ValueError(f"The closure must return a scalar loss, got a tensor of shape {tuple(value.shape)}.")
    value = value if value.is_floating_point() else value.to(torch.get_default_dtype())
    return value.detach().clone()


def check_loss(loss: Any) -> Tensor:
    """Return what ``loss_fn`` returned, or raise if SAM cannot call ``backward()`` on it."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn must return the mean loss as a tensor, with its graph; got {_kind(loss)}.")
    if loss.numel() != 1:
        raise ValueError(
            f"loss_fn must return one mean loss, got a tensor of shape {tuple(loss.shape)}. Use loss.mean()."
        )
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn returned a loss that is detached from the parameters: return it without detach(), item() or "
            "torch.no_grad(). SAM calls backward() itself."
        )
    return loss


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
