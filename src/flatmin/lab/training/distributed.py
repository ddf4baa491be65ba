"""The worker processes of a run, as torchrun starts them on one host or several.

Only the main process (rank 0) reads and writes the run's directory; the others get what they need from it, so hosts
need not share a file system.
"""

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

GLOO_SHUTDOWN_SECONDS = 0.1
LONG_TIMEOUT = timedelta(days=7)  # for downloads, unpacking and relabeling, which one worker does for all
POLL_SECONDS = 0.02

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Workers:
    """All worker processes, seen from this one. Every method is collective: all workers have to call it."""

    rank: int = 0
    local_rank: int = 0
    count: int = 1
    device: torch.device
    group: dist.ProcessGroup | None = None
    """On the CPU and with a long timeout, for Python objects."""

    @property
    def is_main(self) -> bool:
        """Whether this is the main process, which reads and writes files and prints."""
        return self.rank == 0

    def on_main(self, function: Callable[[], T]) -> T:
        """Call a function in the main process only and return its result on every worker.

        The other workers wait as long as it takes. If it raises an error, all of them raise it.
        """
        if self.count == 1:
            return function()
        value, error = _attempt(function) if self.is_main else (None, None)
        message = [(value, _summary(error))]
        dist.broadcast_object_list(message, src=0, group=self.group)
        self._raise([message[0][1]], error)
        return message[0][0]  # type: ignore[return-value]

    def on_each(self, function: Callable[[], T]) -> T:
        """Call a function on every worker, on the first of each host before the others, and return its own result.

        So one worker per host downloads. If any of them raises an error, all workers raise the first one.
        """
        if self.count == 1:
            return function()
        value: T | None = None
        error: Exception | None = None
        for is_first_round in (True, False):
            if is_first_round == (self.local_rank == 0):
                value, error = _attempt(function)
            errors: list[tuple[type[Exception], str] | None] = [None] * self.count
            where = "" if self.is_main else f" (worker {self.rank} on {socket.gethostname()})"
            dist.all_gather_object(errors, _summary(error, where), group=self.group)
            self._raise(errors, error)
        return value  # type: ignore[return-value]

    def _raise(self, errors: Sequence[tuple[type[Exception], str] | None], own: Exception | None) -> None:
        found = next((error for error in errors if error is not None), None)
        if found is None:
            return
        if own is not None and self.is_main:
            raise own
        kind, message = found
        error = kind.__new__(kind, message)  # not every error can be made from its message alone
        error.is_on_all_workers = True  # type: ignore[attr-defined]
        raise error

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all workers."""
        values = values.clone()
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors, in place, by their means over all workers, with one message for each dtype."""
        if self.count == 1:
            return
        for dtype in {t.dtype for t in tensors}:
            alike = [t for t in tensors if t.dtype == dtype]
            flat = torch.cat([t.reshape(-1) for t in alike]).div_(self.count)
            dist.all_reduce(flat)
            for t, mean in zip(alike, torch.split(flat, [t.numel() for t in alike]), strict=True):
                t.copy_(mean.view_as(t))

    def gather(self, values: Tensor) -> list[Tensor]:
        """Return the tensor of every worker."""
        if self.count == 1:
            return [values]
        gathered = [torch.empty_like(values) for _ in range(self.count)]
        dist.all_gather(gathered, values)
        return gathered


@contextmanager
def join_workers() -> Iterator[Workers]:
    """Join the workers that torchrun started (its variables are in the environment), or be the only one."""
    count, local_rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if count == 1:
        yield Workers(device=device)
        return
    starts = not dist.is_initialized()
    if starts:
        store, rank, count = next(rendezvous("env://"))
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=_unused_part(store, rank, count), rank=rank, world_size=count)
    try:
        yield Workers(
            rank=dist.get_rank(),
            local_rank=local_rank,
            count=dist.get_world_size(),
            device=device,
            group=dist.new_group(backend="gloo", timeout=LONG_TIMEOUT),
        )
    finally:
        if starts:
            dist.destroy_process_group()
            # A wrapped model keeps the group, and so gloo's threads, alive. One that drops the last tensor of a
            # finished message only after the interpreter has begun to exit would abort the whole process.
            time.sleep(GLOO_SHUTDOWN_SECONDS)


def _unused_part(store: Store, rank: int, count: int) -> Store:
    """Return a part of the store that no earlier workers used; rank 0 chooses it and tells each of the others.

    torchrun's store outlives its workers, so after a restart it still has the addresses of dead ones. The number
    of restarts cannot tell them apart, because a host that was restarted counts from 0 again.
    """
    if rank > 0:
        question = uuid.uuid4().hex
        store.set(f"flatmin/question/{rank}", question)
        name = store.get(f"flatmin/answer/{question}").decode()
        store.set(f"flatmin/{name}/{rank}", "joined")
        return PrefixStore(name, store)
    name, answered = uuid.uuid4().hex, set()
    while not store.check([f"flatmin/{name}/{other}" for other in range(1, count)]):
        for other in range(1, count):
            question = store.get(f"flatmin/question/{other}").decode()  # perhaps a dead worker's: ask again
            if question not in answered:
                store.set(f"flatmin/answer/{question}", name)
                answered.add(question)
        time.sleep(POLL_SECONDS)
    return PrefixStore(name, store)


def _attempt(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error


def _summary(error: Exception | None, where: str = "") -> tuple[type[Exception], str] | None:
    return None if error is None else (type(error), f"{error}{where}")
