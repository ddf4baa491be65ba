"""Lets several passes draw the same random numbers, and workers the same or different directions."""

import ctypes
import pickle
import random
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flatmin.core.ddp import is_parallel

MT19937_BYTES = 2500  # 624 words and a position


class _NumPyState(NamedTuple):
    state: Any
    memory: bytes | None
    """The generator's memory, if every draw changes it: then an untouched generator is neither read nor written."""


_latest: _NumPyState | None = None


def _numpy_memory() -> bytes | None:
    generator = sys.modules["numpy"].random.get_bit_generator()
    if type(generator).__name__ != "MT19937":
        return None
    return ctypes.string_at(generator.ctypes.state_address, MT19937_BYTES)


def _numpy_state() -> _NumPyState | None:
    """Return the state of NumPy's global generator, None if nobody has imported NumPy."""
    global _latest
    if "numpy" not in sys.modules:
        return None
    memory = _numpy_memory()
    if _latest is None or memory is None or _latest.memory != memory:
        state = sys.modules["numpy"].random.get_state(legacy=False)
        # Normal numbers are drawn in pairs; the second one comes from outside of this memory.
        _latest = _NumPyState(state, None if state.get("has_gauss") else memory)
    return _latest


class RandomState:
    """The state of the global generators of torch (CPU and the given devices), NumPy and Python when it was made.

    Reading and writing it touches the host only: nothing synchronizes with the device.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._torch: dict[torch.device, Tensor] = {torch.device("cpu"): torch.get_rng_state()}
        for device in devices:
            if device.type not in ("cpu", "meta"):
                self._torch[device] = torch.get_device_module(device).get_rng_state(device)
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def restore(self) -> None:
        """Make the generators draw again what they drew since."""
        for device, state in self._torch.items():
            if device.type == "cpu":
                torch.set_rng_state(state)
            else:
                torch.get_device_module(device).set_rng_state(state, device)
        random.setstate(self._python)
        if self._numpy is not None and (self._numpy.memory is None or self._numpy.memory != _numpy_memory()):
            sys.modules["numpy"].random.set_state(self._numpy.state)

    def differences(self, other: "RandomState") -> list[str]:
        """Return the names of the generators that stand elsewhere in another state."""
        names = [
            f"torch's generator ({device})"
            for device, state in self._torch.items()
            if _bytes(state) != _bytes(other._torch[device])
        ]
        if self._numpy is not None and other._numpy is not None and not _same(self._numpy, other._numpy):
            names.append("NumPy's generator")
        return names + ["Python's generator"] * (self._python != other._python)


def _bytes(state: Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())  # `torch.equal` counts as a device sync


def _same(one: _NumPyState, other: _NumPyState) -> bool:
    return one is other or pickle.dumps(one.state) == pickle.dumps(other.state)


def direction_generator(device: torch.device, *, shared: bool, replica: int = 0) -> torch.Generator:
    """Return a new generator for random directions, seeded by torch's seed: alike on all workers, or one for each.

    Under HSDP it is shared by the ranks of each replica.
    """
    seed = torch.initial_seed()
    if is_parallel() and shared:
        seeds = [seed]
        dist.broadcast_object_list(seeds, src=0)
        seed = seeds[0] + replica
    elif is_parallel():
        seed += dist.get_rank()
    return torch.Generator(device).manual_seed(seed % 2**63)
