"""Imports torchvision, also where its compiled operators cannot be loaded; the lab gets it from here.

A torchvision wheel built for CUDA does not find its compiled library's dependencies next to a CPU-only torch
of the same version. Its Python part then fails on import ("operator torchvision::nms does not exist"),
because it attaches shape functions to operators that nobody has defined. None of them (they belong to object
detection) is used by flatmin, so declaring their names is enough. Where the compiled library loads, nothing
is declared.
"""

import importlib.util
from pathlib import Path

import torch

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

_declared: torch.library.Library | None = None  # torch forgets the operators of a Library that is garbage-collected


def declare_missing_operators() -> bool:
    """Declare the names that torchvision's import needs if its compiled library cannot be loaded; return whether so."""
    global _declared
    if _declared is None and not _compiled_library_loads():
        _declared = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for schema in SCHEMAS:
            _declared.define(schema)  # type: ignore[no-untyped-call]
    return _declared is not None


def _compiled_library_loads() -> bool:
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        return True  # not installed: the import itself has to say so
    for library in Path(package.origin).parent.glob("_C*"):
        if library.suffix in {".so", ".pyd", ".dylib"}:
            try:
                torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
            except OSError:
                continue
            return True
    return False


declare_missing_operators()

import torchvision  # noqa: E402  (now it can be)

__all__ = ["declare_missing_operators", "torchvision"]
