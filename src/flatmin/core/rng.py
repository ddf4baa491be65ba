"""Lets several passes draw the same random numbers, and workers the same or different directions."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from flatmin.core.ddp import is_parallel


class RandomState:
    """The state of torch's default generators, on the CPU and on the given devices, at the moment it was made.

    Reading and writing it touches the host only: nothing synchronizes with the device.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._cpu = torch.get_rng_state()
        self._others: list[tuple[Any, torch.device, torch.Tensor]] = []
        for device in devices:
            if device.type not in ("cpu", "meta"):
                module = torch.get_device_module(device)
                self._others.append((module, device, module.get_rng_state(device)))

    def restore(self) -> None:
        """Make the generators draw again what they drew since."""
        torch.set_rng_state(self._cpu)
        for module, device, state in self._others:
            module.set_rng_state(state, device)


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


@contextlib.contextmanager
def replayed(noise: RandomState | None, devices: Sequence[torch.device]) -> Iterator[None]:
    """Draw again what was drawn since ``noise``, and end where the generators are now."""
    if noise is None:
        yield
        return
    after = RandomState(devices)
    noise.restore()
    try:
        yield
    finally:
        after.restore()
