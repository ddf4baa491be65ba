"""Worker processes in one gloo group, which run a function of `(rank, *args)` all at once; and torchrun."""

import contextlib
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE_SECONDS = 300  # until a deadlock is called one


@contextlib.contextmanager
def recorded_collectives():
    """Record calls of torch.distributed's functions, with their arguments."""
    names = [n for n in dir(dist) if n.startswith(("all_", "reduce", "broadcast", "gather", "scatter"))]
    originals = {n: getattr(dist, n) for n in names if callable(getattr(dist, n))}
    calls = []

    def recording(name):
        def call(*args, **kwargs):
            calls.append((name, args, kwargs))
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, recording(name))
    try:
        yield calls
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


def torchrun(folder, script, *arguments, options=(), **environment):
    """Run a script in two processes, in a folder, and return what they printed as errors."""
    (folder / "script.py").write_text(script)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options]
    done = subprocess.run(
        [*launcher, str(folder / "script.py"), *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def as_under_torchrun(rank, function, *args):
    """Call a function in one of two worker processes with what torchrun tells its own; their group exists already."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 0, "TORCHELASTIC_RUN_ID": "test"}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()}):
        return function(rank, *args)


def _serve(rank, world, rendezvous, pipe):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    while (message := pipe.recv()) is not None:
        function, args = message
        try:
            pipe.send(("ok", function(rank, *args)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))
    dist.destroy_process_group()


class WorkerProcesses:
    def __init__(self, world):
        self._world, self._pipes, self._processes = world, [], []

    def _start(self):
        context = mp.get_context("forkserver")
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self._world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._world, Path(self._folder.name) / "rendezvous", theirs), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function, *args):
        """Return what the function returned on each rank. It must be importable: not defined in a test module."""
        if not self._pipes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(PATIENCE_SECONDS):
                self.close()
                raise RuntimeError(f"rank {rank} does not answer")
            status, result = pipe.recv()
            results.append(result)
            if status == "error":
                self.close()  # the others may wait forever
                raise RuntimeError(f"rank {rank}:\n{result}")
        return results

    def close(self):
        for pipe in self._pipes:  # all of them first: each waits for the others when it leaves the group
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
        self._pipes, self._processes = [], []
        if hasattr(self, "_folder"):
            self._folder.cleanup()
