"""An optimizer around another one, which schedulers, checkpoints and trainers see as one."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from flatmin.core.checks import MIGRATION

Step = TypeVar("Step", bound=Callable[..., Any])
Yielded = TypeVar("Yielded")
OF_OTHER_LIBRARIES = ("first_step", "second_step", "_grad_norm", "base_optimizer")


def with_own_hooks(step: Step) -> Step:
    """Run the hooks registered with the wrapper around its ``step``; global hooks run around the base's step alone.

    Without this, torch would wrap ``step`` itself and call global hooks once for the wrapper and once for its base.
    """

    @functools.wraps(step)
    def wrapped(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        for pre_hook in self._optimizer_step_pre_hooks.values():
            changed = pre_hook(self, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        with record_function(f"Optimizer.step#{type(self).__name__}.step"):  # the name that torch gives it
            result = step(self, *args, **kwargs)
        for post_hook in self._optimizer_step_post_hooks.values():
            post_hook(self, args, kwargs)
        return result

    wrapped.hooked = True  # type: ignore[attr-defined]
    return not_compiled(cast(Step, wrapped))


def not_compiled(function: Step) -> Step:
    """Break the graph of a compiled train step here: what SAM does between the passes cannot be traced."""
    return cast(Step, torch._disable_dynamo(function))  # type: ignore[attr-defined]


class NotCompiledContext(AbstractContextManager[Yielded]):
    """A context manager that breaks the graph where it is entered and left."""

    def __init__(self, context: AbstractContextManager[Yielded]) -> None:
        self._context = context

    @not_compiled
    def __enter__(self) -> Yielded:
        return self._context.__enter__()

    @not_compiled
    def __exit__(self, *error: Any) -> bool | None:
        return self._context.__exit__(*error)


class OptimizerWrapper(Optimizer):
    """Shares parameter groups, state and defaults with the optimizer it wraps, and passes everything else on to it.

    Subclasses set ``base`` and call ``__setstate__`` in place of ``Optimizer.__init__``, which would make groups and
    separate state. They reset gradients, add groups and step by ``base``.
    """

    base: Optimizer

    # Properties, because loading a state dict replaces both objects in the base optimizer.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base optimizer's parameter groups."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base.param_groups = groups

    @property
    def state(self) -> Any:
        """The base optimizer's state."""
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The base optimizer's defaults."""
        return self.base.defaults

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a public attribute of the base optimizer, such as the ``train()`` of a schedule-free one."""
            base = self.__dict__.get("base")
            if base is not None and not name.startswith("_") and hasattr(base, name):
                return getattr(base, name)
            hint = f" {MIGRATION}" if name in OF_OTHER_LIBRARIES else ""
            kind = type(self).__name__
            raise AttributeError(f"{kind!r} object and its base optimizer have no attribute {name!r}.{hint}")

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimizer's state dict."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = self.base.state_dict()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the base optimizer."""
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        self.base.load_state_dict(state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        super().__setstate__({})  # the tables of hooks
