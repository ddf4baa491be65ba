"""In which numbers a model is computed, and whether always in the same order."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch

Precision = Literal["auto", "float32", "bfloat16"]


def resolve_precision(precision: Precision, device: torch.device) -> Literal["float32", "bfloat16"]:
    """Return what ``auto`` means: bfloat16 if the device multiplies it natively; elsewhere it is emulated, and slow."""
    if precision != "auto":
        return precision
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = any(map(torch.cpu.get_capabilities().get, ("amx_bf16", "avx512_bf16", "bf16")))
    return "bfloat16" if native else "float32"


def autocast(precision: Literal["float32", "bfloat16"], device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which the model is called."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Let CUDA compute in the same order every time, if asked to; an operation that cannot raises an error.

    cuBLAS reads its variable when CUDA starts: call it before.
    """
    if not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.backends.cudnn.benchmark = benchmark
