"""What each of two processes does in tests/lab/training/test_distributed.py."""

import os

import torch
import torch.distributed as dist

from flatmin.lab.training.distributed import join_workers


def groups_of_long_work(rank):
    """Return the timeouts of the groups whose collectives wait for the main process, and what it returned."""
    used = []
    broadcast = dist.broadcast_object_list

    def recorded(objects, *arguments, group=None, **settings):
        used.append(group._get_backend(torch.device("cpu")).options._timeout)
        return broadcast(objects, *arguments, group=group, **settings)

    os.environ["WORLD_SIZE"], dist.broadcast_object_list = "2", recorded
    try:
        with join_workers() as workers:
            return used, workers.on_main(lambda: f"from {rank}")
    finally:
        del os.environ["WORLD_SIZE"]
        dist.broadcast_object_list = broadcast
