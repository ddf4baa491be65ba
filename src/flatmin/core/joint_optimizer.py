"""Several base optimizers as one: each has its own parameters and takes its own step. And their momentum."""

import itertools
from collections import ChainMap
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from flatmin.core.checks import check_base
from flatmin.core.flat_buffers import VectorOf
from flatmin.core.optimizer_wrapper import with_own_hooks

MOMENTUM_KEYS = ("momentum_buffer", "exp_avg")


def as_one(base: Optimizer | Sequence[Optimizer]) -> Optimizer:
    """Return one optimizer for one or several, or raise if one of them cannot be a base."""
    if not isinstance(base, list | tuple) or not any(isinstance(one, Optimizer | type) for one in base):
        check_base(base)
        return base  # type: ignore[return-value]
    for one in base:
        check_base(one)
    return base[0] if len(base) == 1 else JointOptimizer(base)


def bases_of(base: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers that a base consists of."""
    return base.bases if isinstance(base, JointOptimizer) else (base,)


def momentum_in(base: Optimizer) -> VectorOf:
    """Return a function that gives the momentum of a parameter, None if it has none."""
    states = base.state

    def momentum_of(parameter: Tensor) -> Tensor | None:
        state = states.get(parameter, {})
        return next((state[key] for key in MOMENTUM_KEYS if state.get(key) is not None), None)

    return momentum_of


def has_momentum(base: Optimizer, num_steps: int) -> bool:
    """Return whether the base optimizers have taken a step, and so have a momentum; raise if one has none by then."""
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


class JointOptimizer(Optimizer):
    """Has the parameter groups of all its optimizers, and steps each in turn.

    The groups are the optimizers' own, and looked up anew each time: schedulers may hold any of them. A state dict has
    the form that one optimizer with all groups would have, and is made of theirs, so their hooks run.
    """

    def __init__(self, bases: Sequence[Optimizer]) -> None:
        owners: dict[Tensor, int] = {}
        for index, base in enumerate(bases):
            for group_index, group in enumerate(base.param_groups):
                for p in group["params"]:
                    if owners.setdefault(p, index) != index:
                        raise ValueError(
                            f"bases {owners[p]} and {index} have a parameter in common, of shape {tuple(p.shape)}, in "
                            f"group {group_index} of the latter: it would be stepped twice. Give each to one of them."
                        )
        self.__setstate__({"bases": tuple(bases)})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimizers, one after the other."""
        return [group for base in self.bases for group in base.param_groups]

    @property
    def state(self) -> "JointState":  # type: ignore[override]
        """The state of all parameters."""
        return JointState(self.bases)

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults that all optimizers have, with the first one's values."""
        first, *others = (base.defaults for base in self.bases)
        return {name: value for name, value in first.items() if all(name in other for other in others)}

    @with_own_hooks
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Let each optimizer take its step."""
        for base in self.bases:
            base.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        for base in self.bases:
            base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise: which optimizer is meant?"""
        raise ValueError("There are several base optimizers: add the group to one, opt.bases[i].add_param_group(...).")

    def state_dict(self) -> dict[str, Any]:
        """Return the state dicts of all optimizers as one, with parameters counted through."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for base in self.bases:
            first = sum(len(group["params"]) for group in groups)
            own = base.state_dict()
            state |= {first + index: values for index, values in own["state"].items()}
            groups += [
                {**group, "params": [first + index for index in group["params"]]} for group in own["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of all optimizers; if one of them rejects its part, none changes."""
        groups = list(state_dict["param_groups"])
        counts = [len(base.param_groups) for base in self.bases]
        if len(groups) != sum(counts):
            raise ValueError(
                f"The state dict has {len(groups)} parameter groups, but the base optimizers have "
                f"{' + '.join(map(str, counts))}. Load it into the same optimizers, in the same order."
            )
        before = [(base.state, base.param_groups) for base in self.bases]
        try:
            for base, count in zip(self.bases, counts, strict=True):
                own, groups = groups[:count], groups[count:]
                names = {name for group in own for name in group["params"]}
                state = {name: values for name, values in state_dict["state"].items() if name in names}
                base.load_state_dict({"state": state, "param_groups": own})
        except BaseException:
            for base, (state, own) in zip(self.bases, before, strict=True):
                base.state, base.param_groups = state, own
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {"bases": self.bases}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.bases: tuple[Optimizer, ...] = state["bases"]
        super().__setstate__({})  # the tables of hooks

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self.bases))}]"


class JointState(ChainMap[Tensor, Any]):
    """The state of the parameters of several optimizers, looked up in the one that a parameter belongs to."""

    def __init__(self, bases: Sequence[Optimizer]) -> None:
        super().__init__(*(base.state for base in bases))
        self._bases = bases

    def _owner(self, parameter: Tensor) -> Any:
        for state in self.maps:
            if parameter in state:
                return state
        for base in self._bases:
            if any(p is parameter for group in base.param_groups for p in group["params"]):
                return base.state
        raise KeyError(parameter)

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._owner(parameter)[parameter]  # creates an empty state, as in any optimizer

    def __setitem__(self, parameter: Tensor, state: Any) -> None:
        self._owner(parameter)[parameter] = state

    def __delitem__(self, parameter: Tensor) -> None:
        del self._owner(parameter)[parameter]

    def __iter__(self) -> Iterator[Tensor]:
        return itertools.chain(*self.maps)
