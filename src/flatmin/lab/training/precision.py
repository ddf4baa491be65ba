"""In which numbers a network is computed, and what that machine is called."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Precision = Literal["auto", "float32", "bfloat16"]


def computes_in_bfloat16(device: torch.device) -> bool:
    """Return whether the hardware multiplies bfloat16 natively; elsewhere it is emulated, and slow."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(name)) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def resolve_precision(precision: Precision, device: torch.device) -> Literal["float32", "bfloat16"]:
    """Return what ``auto`` means on this device."""
    if precision == "auto":
        return "bfloat16" if computes_in_bfloat16(device) else "float32"
    return precision


def autocast(precision: Literal["float32", "bfloat16"], device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which the network is called."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
