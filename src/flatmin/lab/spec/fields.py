"""Fields of frozen dataclasses: checked types, errors that name them, and JSON."""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from flatmin.lab.errors import SpecError


@functools.cache  # a study makes thousands of specs
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def build(kind: Any, tree: object, path: str) -> Any:
    """Return a dataclass built from JSON's objects, inner dataclasses included; a SpecError names a bad field."""
    if not isinstance(tree, dict):
        raise SpecError(f"{path or 'The spec'} must be a JSON object, got {tree!r}.")
    hints = _hints(kind)
    values: dict[str, Any] = {}
    for name, value in tree.items():
        if name not in hints:
            hint = did_you_mean(str(name), hints)
            raise SpecError(f"{path}{name} is an unknown field.{hint} Allowed: {', '.join(hints)}.")
        options: tuple[Any, ...] = (hints[name], *get_args(hints[name]))
        inner = next((option for option in options if dataclasses.is_dataclass(option)), None)
        if inner is not None and value is not None:
            value = build(inner, value, f"{path}{name}.")
        elif value == "inf" and float in options:
            value = math.inf
        values[name] = value
    return kind(**values)


def plain(spec: Any, *, leave_defaults_out: bool = False) -> dict[str, Any]:
    """Return a dataclass as JSON's objects, inner dataclasses included."""
    # JSON has no infinity; p = inf is the string "inf".
    tree: dict[str, Any] = {}
    for f in dataclasses.fields(spec):
        value = getattr(spec, f.name)
        if leave_defaults_out and value == (f.default if f.default_factory is dataclasses.MISSING else None):
            continue
        if dataclasses.is_dataclass(value):
            tree[f.name] = plain(value, leave_defaults_out=leave_defaults_out)
        else:
            tree[f.name] = "inf" if value == math.inf else value
    return tree


def finite(tree: Any) -> Any:
    """Return what goes into JSON with null for every number that JSON does not have.

    Example:
        >>> finite({"loss": [0.5, math.inf], "error": math.nan})
        {'loss': [0.5, None], 'error': None}
    """
    return map_leaves(lambda leaf: None if isinstance(leaf, float) and not math.isfinite(leaf) else leaf, tree)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to all that is neither an object nor a list of JSON."""
    if isinstance(tree, dict):
        return {name: map_leaves(function, value) for name, value in tree.items()}
    return [map_leaves(function, value) for value in tree] if isinstance(tree, list | tuple) else function(tree)


class _Allowed(NamedTuple):
    """What a field may hold: an instance of one of some classes, or one of some words."""

    hint: Any
    classes: tuple[type, ...]
    words: tuple[object, ...]


@functools.cache
def _allowed(kind: Any) -> dict[str, _Allowed]:
    allowed = {}
    for name, hint in _hints(kind).items():
        options = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        classes = tuple(option for option in options if get_origin(option) is not Literal)
        words = tuple(word for option in options if get_origin(option) is Literal for word in get_args(option))
        allowed[name] = _Allowed(hint, classes, words)
    return allowed


def conform(spec: Any) -> None:
    """Check the type of every field; 1 becomes 1.0 where a float is meant: both are one run."""
    kind: Any = type(spec)
    for name, (hint, classes, words) in _allowed(kind).items():
        value = getattr(spec, name)
        if float in classes:
            if isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
                object.__setattr__(spec, name, value)
            if isinstance(value, float) and math.isnan(value):
                raise field_error(spec, name, "a number")
        is_allowed = isinstance(value, classes) and (bool in classes or not isinstance(value, bool))
        if not is_allowed and value not in words:
            raise field_error(spec, name, _describe(hint))


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    if isinstance(hint, types.UnionType):
        return " or ".join(_describe(option) for option in get_args(hint))
    return "None" if hint is types.NoneType else f"of type {hint.__name__}"


def require(spec: Any, *conditions: tuple[str, bool, str]) -> None:
    """Raise the error of the first field whose condition does not hold: (name, whether it holds, what is allowed)."""
    for name, holds, allowed in conditions:
        if not holds:
            raise field_error(spec, name, allowed)


def field_error(spec: Any, name: str, allowed: str, hint: str = "") -> SpecError:
    """Return the error that names a field, its value and what is allowed."""
    owner = "" if type(spec).__name__ == "Experiment" else type(spec).__name__.lower() + "."
    return SpecError(f"{owner}{name} must be {allowed}; got {getattr(spec, name)!r}.{hint}")


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return a sentence with the nearest word, or nothing."""
    close = get_close_matches(word, list(words), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
