"""The state that a function can reach: variables, attributes and tensors, each with a name."""

import collections
import functools
import inspect
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

CONTAINERS = (list, dict, set, collections.deque)
NOT_STATE = frozenset(vars(nn.Module())) - {"training"}
MAX_DEPTH = 3  # of attributes: `self.metrics.accuracy`


class Slot(NamedTuple):
    """Where a value is bound: a variable of an enclosing scope, a global, an attribute, a buffer or a parameter."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], None]


class Saved:
    """The value of a slot at the moment it was made; containers with their items, tensors with their numbers."""

    def __init__(self, slot: Slot) -> None:
        self.slot, self.value = slot, slot.get()
        self._content = _content(self.value)

    def is_changed(self) -> bool:
        """Return whether the slot has another value now."""
        now = self.slot.get()
        if isinstance(now, Tensor) and isinstance(self.value, Tensor):
            return not _equal(now.detach(), self._content)
        if now is not self.value:
            return not _is_same(now, self.value)
        return not _equal(_content(now), self._content)

    @torch.no_grad()
    def restore(self) -> None:
        """Bind the value again, and put its content back."""
        value, content = self.value, self._content
        self.slot.put(value)
        if isinstance(value, Tensor):
            if value.shape == content.shape and not _equal(value.detach(), content):
                value.data.copy_(content)
        elif isinstance(value, CONTAINERS):
            value.clear()
            value.extend(content) if hasattr(value, "extend") else value.update(content)
        elif _is_array(value):
            value[...] = content
        elif isinstance(value, torch.Generator):
            value.set_state(content)
        elif isinstance(value, random.Random):
            value.setstate(content)
        elif is_numpy_generator(value):
            value.bit_generator.state = content


def slots_of(function: Any) -> list[Slot]:
    """Return what a function refers to: in enclosing scopes, as globals, as defaults, through its object.

    Attributes of objects and tensors of modules are among them, under names like ``model.queue``.
    """
    slots: dict[tuple[int, str], Slot] = {}
    seen = {id(function)}
    todo: list[tuple[str, Any, int]] = []

    def add(owner: Any, key: str, slot: Slot, depth: int) -> None:
        slots.setdefault((id(owner), key), slot)
        todo.append((slot.name, slot.get(), depth))

    def add_items(name: str, items: Any, keys: Iterable[str], depth: int) -> None:
        for key in keys:
            slot = Slot(f"{name}{key}", functools.partial(items.get, key), functools.partial(items.__setitem__, key))
            add(items, key, slot, depth)

    def look_into(name: str, value: Any, depth: int) -> None:
        if inspect.isfunction(value) and _is_users(value):
            names = value.__code__.co_freevars
            for key, cell in zip(names, value.__closure__ or (), strict=True):
                if _is_filled(cell):
                    put = functools.partial(setattr, cell, "cell_contents")
                    add(cell, key, Slot(key, functools.partial(getattr, cell, "cell_contents"), put), depth)
            used = [key for key in value.__code__.co_names if key in value.__globals__]
            add_items("", value.__globals__, used, depth)
            defaults = {f"default {i}": one for i, one in enumerate(value.__defaults__ or ())}
            add_items("", defaults, defaults, depth)
        elif inspect.ismethod(value):
            todo.extend([("", value.__func__, depth), ("self", value.__self__, depth)])
        elif isinstance(value, functools.partial):
            parts = {f"argument {i}": one for i, one in enumerate(value.args)} | value.keywords
            todo.append((name, value.func, depth))
            add_items("", parts, parts, depth)
        elif isinstance(value, nn.Module):
            for path, module in value.named_modules(prefix=name):
                seen.add(id(module))
                for tensors in (module._buffers, module._parameters):
                    add_items(f"{path}.", tensors, list(tensors), MAX_DEPTH)
                if not type(module).__module__.startswith("torch."):
                    keys = [key for key in vars(module) if key not in NOT_STATE]
                    add_items(f"{path}.", module.__dict__, keys, depth + 1)
        elif depth < MAX_DEPTH and _is_users(value):
            add_items(f"{name}.", vars(value), list(vars(value)), depth + 1)

    look_into("", function, 0)
    while todo:
        name, value, depth = todo.pop(0)
        if id(value) not in seen:
            seen.add(id(value))
            look_into(name, value, depth)
    return list(slots.values())


def modules_in(function: Any) -> list[nn.Module]:
    """Return the modules that a function refers to."""
    values = [function, *(slot.get() for slot in slots_of(function))]
    return list({id(value): value for value in values if isinstance(value, nn.Module)}.values())


def _content(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, CONTAINERS) or _is_array(value):
        return value.copy()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    return value.bit_generator.state if is_numpy_generator(value) else None


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, CONTAINERS):
        return len(one) == len(other) and all(map(_is_same, *map(_items, (one, other))))
    if _is_array(one):
        return bool((one == other).all())
    return repr(one) == repr(other)


def _items(container: Any) -> Iterator[Any]:
    return iter([*container, *container.values()] if isinstance(container, dict) else container)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, int | float | str) and one == other)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def is_numpy_generator(value: Any) -> bool:
    """Return whether it is a generator object of NumPy's."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.random.Generator)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_users(value: Any) -> bool:
    """Return whether it is a function or an object with attributes, and not one of these libraries'."""
    if isinstance(value, type | types.ModuleType | Tensor | torch.optim.Optimizer) or not hasattr(value, "__dict__"):
        return False
    origin = value if inspect.isfunction(value) else type(value)
    return str(origin.__module__).split(".")[0] not in {"torch", "numpy", "builtins"}
