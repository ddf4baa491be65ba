"""What passes write into Python objects (counters, lists, metrics) is kept once per step."""

import collections
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

CONTAINERS = frozenset(
    [list, dict, set, collections.deque, collections.defaultdict, collections.OrderedDict, collections.Counter]
)
# Parameters, buffers, submodules and hooks of a module; the data of a trainer.
NOT_RECORDS = frozenset(vars(nn.Module())) | {"train_dataset", "eval_dataset"}


class Records:
    """The attributes of some objects at the moment it was made, to be put back by ``restore()``.

    Attributes are bound again to what they were. Of lists, dicts, sets and deques the content is put back too, also
    within dicts, and of torchmetrics the states. Other objects and tensors that are changed in place are left alone.
    """

    def __init__(self, owners: Iterable[object]) -> None:
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._states: list[tuple[Tensor, Tensor]] = []
        for owner in owners:
            attributes = vars(owner)
            kept = attributes.copy()
            self._attributes.append((attributes, kept))
            for name, value in kept.items():
                if type(value) in CONTAINERS and name not in NOT_RECORDS:
                    self._keep_content(value)
            for name in kept.get("_defaults", ()):  # torchmetrics update their states in place
                if isinstance(kept.get(name), Tensor):
                    self._states.append((kept[name], kept[name].detach().clone()))

    def _keep_content(self, value: Any) -> None:
        if id(value) in self._containers:
            return
        self._containers[id(value)] = (value, value.copy())
        if isinstance(value, dict):
            for item in value.values():
                if type(item) in CONTAINERS:
                    self._keep_content(item)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for attributes, kept in self._attributes:
            for name in attributes.keys() - kept.keys():
                del attributes[name]
            attributes.update(kept)
        for container, content in self._containers.values():
            container.clear()
            container.extend(content) if hasattr(container, "extend") else container.update(content)
        for state, value in self._states:
            state.copy_(value)


class UnrecordedPass:
    """A pass that leaves no records. It has no ``__dict__``: ``check_pass`` looks at the model, not at the trainer."""

    __slots__ = ("_owners", "_run")

    def __init__(self, run: Callable[[], Any], owners: Iterable[object]) -> None:
        self._run, self._owners = run, list(owners)

    def __call__(self) -> Any:
        """Run the pass."""
        before = Records(self._owners)
        try:
            return self._run()
        finally:
            before.restore()


class RecordedPass:
    """A pass that leaves the records of its first run: later ones start where it started, and leave none.

    Example:
        >>> from types import SimpleNamespace
        >>> trainer = SimpleNamespace(losses=[], num_batches=0)
        >>> def run():
        ...     trainer.losses.append(trainer.num_batches)
        ...     trainer.num_batches += 1
        >>> recorded = RecordedPass(run, [trainer])
        >>> recorded(), recorded()
        (None, None)
        >>> trainer
        namespace(losses=[0], num_batches=1)
    """

    def __init__(self, run: Callable[[], Any], owners: Iterable[object]) -> None:
        self._run, self._owners = run, list(owners)
        self._before: Records | None = None
        self.is_repeated = False

    def __call__(self) -> Any:
        """Run the pass."""
        if self._before is None:
            self._before = Records(self._owners)
            return self._run()
        after = Records(self._owners)
        self._before.restore()
        self.is_repeated = True
        try:
            return self._run()
        finally:
            after.restore()
