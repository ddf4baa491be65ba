"""The momentum of the base optimizer, along which ``direction="momentum"`` perturbs."""

from torch import Tensor
from torch.optim import Optimizer

from flatmin.core.flat_buffers import VectorOf
from flatmin.core.joint_optimizer import bases_of

MOMENTUM_KEYS = ("momentum_buffer", "exp_avg")


def momentum_in(base: Optimizer) -> VectorOf:
    """Return a function that gives the momentum of a parameter, None if it has none."""
    states = base.state

    def momentum_of(parameter: Tensor) -> Tensor | None:
        state = states.get(parameter, {})
        return next((state[key] for key in MOMENTUM_KEYS if state.get(key) is not None), None)

    return momentum_of


def has_momentum(base: Optimizer, num_steps: int) -> bool:
    """Return whether the base optimizers have taken a step, and so have a momentum.

    Raises:
        ValueError: one has taken a step and has no momentum.
    """
    found = []
    for one in bases_of(base):
        parameters = [p for group in one.param_groups for p in group["params"]]
        momentum_of = momentum_in(one)
        found.append(any(momentum_of(p) is not None for p in parameters))
        if not found[-1] and (num_steps > 0 or any(one.state.get(p) for p in parameters)):
            raise ValueError(
                f'direction="momentum" needs a base optimizer with a momentum ({" or ".join(MOMENTUM_KEYS)} in its '
                f"state), but {type(one).__name__} has none. Use SGD(..., momentum=0.9) or AdamW, or "
                'direction="gradient".'
            )
    return all(found)
