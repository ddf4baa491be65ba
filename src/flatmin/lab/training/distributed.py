"""The worker processes of a run, as torchrun starts them: who one is, and what all agree on."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

GLOO_SECONDS_TO_LET_GO = 0.1


@dataclass(frozen=True, kw_only=True)
class Workers:
    """This worker and its companions; all methods are collective: every worker has to call them."""

    rank: int = 0
    count: int = 1
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this worker writes files and talks to people."""
        return self.rank == 0

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

    def broadcast_bytes(self, content: bytes | None) -> bytes | None:
        """Return what the leading worker passed."""
        if self.count == 1:
            return content
        size = torch.tensor([-1 if content is None else len(content)], device=self.device)
        dist.broadcast(size, src=0)
        if size.item() < 0:
            return None
        body = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        if self.is_main and content is not None:
            body.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        dist.broadcast(body, src=0)
        return body.cpu().numpy().tobytes()

    def barrier(self) -> None:
        """Wait until all workers are here."""
        if self.count > 1:
            dist.barrier()


@contextmanager
def join_workers() -> Iterator[Workers]:
    """Find the companions that torchrun started (its variables are in the environment), or be alone."""
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
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            # After a restart, torchrun's store on a single host still has the addresses of the workers that died. (On
            # several hosts the hosts' counts may differ; there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives a new store.)
            store = PrefixStore(f"life-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    try:
        yield Workers(rank=dist.get_rank(), count=dist.get_world_size(), device=device)
    finally:
        if starts:
            dist.destroy_process_group()
            if backend == "gloo":
                # A wrapped model keeps the group, and so gloo's threads, alive. One that drops the last tensor of a
                # finished message only after the interpreter has begun to exit would abort the whole process.
                time.sleep(GLOO_SECONDS_TO_LET_GO)
