"""The processes of a sweep on a Ray cluster, on however many nodes.

A worker or node that dies is seen by Ray; the sweep then restarts the job, as it does on one machine, and the job
resumes from its checkpoint. A node that does not see the directory of runs gets the files it needs before a job, and
sends back what changes during one.
"""

import logging
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flatmin.lab.data.roots import ENVIRONMENT_VARIABLE
from flatmin.lab.errors import RunError
from flatmin.lab.sweeps.jobs import Job, JobStatus, describe, status_of_error
from flatmin.lab.sweeps.run_files import FileSender, RunStore, write_files

ANSWER_SECONDS = 120.0  # a node's first process has to import torch


class RayPool:
    """Tasks on a Ray cluster: an existing one, or one on this machine that lasts as long as the pool."""

    def __init__(
        self, run: Callable[..., JobStatus], runs: Path, address: str | None, *, processes: int, threads: int
    ) -> None:
        try:
            import ray
        except ImportError:
            raise RunError("A sweep with the engine ray needs the extra `ray`: pip install 'flatmin[ray]'") from None
        self.ray: Any = ray
        self.run, self.runs, self.address = run, runs, address or os.environ.get("RAY_ADDRESS") or "local"
        self.processes, self.threads = processes, threads or 1
        self.running: dict[Any, str] = {}
        self.owns_connection, self.num_gpus = False, 0
        self.store: Any = None
        # A node that sees this file sees the directory of runs.
        self.token = runs / f".sweep-{uuid.uuid4().hex}"

    def __enter__(self) -> "RayPool":
        self.owns_connection = not self.ray.is_initialized()
        if self.owns_connection:
            self._connect()
        try:
            self._check_nodes()
            self._start_store()
        except BaseException:
            self.__exit__()
            raise
        self.num_gpus = 1 if self.ray.cluster_resources().get("GPU", 0) else 0
        # No retries by Ray itself: the sweep counts the attempts, whatever they failed from.
        options = {"num_cpus": self.threads, "num_gpus": self.num_gpus, "max_retries": 0}
        variables = {"OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads)}
        if ENVIRONMENT_VARIABLE in os.environ:
            variables[ENVIRONMENT_VARIABLE] = os.environ[ENVIRONMENT_VARIABLE]
        self.task = self.ray.remote(_run_on_node).options(**options, runtime_env={"env_vars": variables})
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel what still runs, and leave the cluster as it was found."""
        for reference in self.running:
            self.ray.cancel(reference, force=True)
        self.running.clear()
        if self.store is not None:
            self.ray.kill(self.store)
            self.store = None
        self.token.unlink(missing_ok=True)
        if self.owns_connection:
            self.ray.shutdown()

    def num_free(self) -> int:
        """Return how many jobs could begin now; nodes may come and go."""
        resources = self.ray.cluster_resources()
        capacity = int(resources.get("CPU", 0)) // self.threads
        if self.num_gpus:
            capacity = min(capacity, int(resources.get("GPU", 0)))
        return max(0, (self.processes or max(1, capacity)) - len(self.running))

    def start(self, job: Job) -> None:
        """Hand a job to the cluster."""
        reference = self.task.remote(self.run, job, self.threads, os.getcwd(), self.token, self.store)
        self.running[reference] = job.name

    def poll(self, seconds: float) -> list[tuple[str, JobStatus]]:
        """Return the names and endings of jobs that ended; wait at most so long for one."""
        if not self.running:
            time.sleep(seconds)
            return []
        references, _ = self.ray.wait(list(self.running), num_returns=1, timeout=seconds)
        ended = [(self.running.pop(reference), self._ending(reference)) for reference in references]
        self.ray.get([self.store.end.remote(name) for name, _ in ended])
        return ended

    def stop(self) -> None:
        """Ask all that are running to save and stop; Ray does so as with Ctrl-C."""
        for reference in self.running:
            self.ray.cancel(reference)

    def _ending(self, reference: Any) -> JobStatus:
        exceptions = self.ray.exceptions
        try:
            ending: JobStatus = self.ray.get(reference)
        except exceptions.TaskCancelledError:
            return JobStatus(kind="stopped")
        except exceptions.RayTaskError as error:
            return JobStatus(kind="failed", message=describe(error.cause or error))
        except exceptions.RayError as error:
            first_line = next(iter(str(error).splitlines()), "")
            return JobStatus(kind="died", message=f"Its process or node died ({type(error).__name__}: {first_line})")
        return ending

    def _connect(self) -> None:
        local = self.address == "local"
        cpus = {"num_cpus": self.processes * self.threads} if local and self.processes else {}
        before = signal.getsignal(signal.SIGTERM)
        try:
            self.ray.init(
                self.address,
                include_dashboard=False if local else None,
                log_to_driver=False,
                logging_level=logging.WARNING,
                **cpus,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RunError(
                f"There is no Ray cluster at {self.address}, or its token differs (RAY_AUTH_TOKEN): {error}"
            ) from error
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray would end this process, and nothing would be saved

    def _check_nodes(self) -> None:
        """Let every node import flatmin: an error shows now, and not in every job."""
        nodes = [node["NodeID"] for node in self.ray.nodes() if node["Alive"]]
        for reference in [self._on_node(_answer_on_node, node).remote() for node in nodes]:
            try:
                self.ray.get(reference, timeout=ANSWER_SECONDS)
            except self.ray.exceptions.RayTaskError as error:
                raise RunError(
                    f"A Ray node cannot run flatmin: {describe(error.cause or error)}. Every node needs the same "
                    "flatmin as this machine."
                ) from error
            except self.ray.exceptions.RayError as error:
                raise RunError(f"A Ray node does not answer: {error}") from error

    def _start_store(self) -> None:
        self.runs.mkdir(parents=True, exist_ok=True)
        self.token.touch()
        here = self.ray.get_runtime_context().get_node_id()
        self.store = self._on_node(RunStore, here).remote(self.runs)
        if not self.ray.get(self.store.exists.remote(self.token)):
            raise RunError(
                f"The Ray node of this machine does not see {self.runs}. Start the sweep on a node of the cluster, in "
                "the same container as its Ray processes."
            )

    def _on_node(self, function: Any, node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return self.ray.remote(function).options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        )


def _answer_on_node() -> None:
    """Do nothing, in a process that had to import this file."""


def _run_on_node(
    run: Callable[..., JobStatus], job: Job, threads: int, directory: str, token: Path, store: Any
) -> JobStatus:
    if Path(directory).is_dir():
        os.chdir(directory)  # relative paths in the spec mean what they mean where the sweep was started
    torch.set_num_threads(threads)
    status = run(job) if token.exists() else _run_with_own_files(run, job, store)
    if status.is_device_broken:
        os._exit(1)  # Ray would give this process the next job
    return status


def _run_with_own_files(run: Callable[..., JobStatus], job: Job, store: Any) -> JobStatus:
    """Run a job in a directory of this node, from the files of the store, which is sent what changes."""
    import ray

    with tempfile.TemporaryDirectory(prefix="flatmin-") as folder:
        files = ray.get(store.begin.remote(job))
        if isinstance(files, JobStatus):
            return files
        write_files(Path(folder), files)
        with FileSender(Path(folder), lambda new, removed: ray.get(store.write.remote(new, removed))) as sender:
            status = run(job, runs=Path(folder))
    if sender.error is not None:
        return status_of_error(getattr(sender.error, "cause", None) or sender.error)
    return status
