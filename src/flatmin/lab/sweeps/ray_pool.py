"""The processes of a sweep on a Ray cluster, on however many nodes.

A worker or node that dies is seen by Ray; the sweep then restarts the job, as it does on one machine, and the job
resumes from its checkpoint. So the directory of runs has to be on a file system that all nodes share.
"""

import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flatmin.lab.data.roots import ENVIRONMENT_VARIABLE
from flatmin.lab.errors import RunError
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.run_job import JobStatus, describe

PROBE_SECONDS = 120.0  # a node's first process has to import torch


class RayPool:
    """Tasks on a Ray cluster: an existing one, or one on this machine that lasts as long as the pool."""

    def __init__(
        self, run: Callable[[Job], JobStatus], runs: Path, address: str | None, *, processes: int, threads: int
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

    def __enter__(self) -> "RayPool":
        self.owns_connection = not self.ray.is_initialized()
        if self.owns_connection:
            self._connect()
        try:
            self._check_that_nodes_see_the_runs()
        except BaseException:
            self.__exit__()
            raise
        self.num_gpus = 1 if self.ray.cluster_resources().get("GPU", 0) else 0
        # No retries by Ray itself: the sweep counts the attempts, whatever they failed from.
        options = {"num_cpus": self.threads, "num_gpus": self.num_gpus, "max_retries": 0}
        self.task = self.ray.remote(_run_on_node).options(**options, runtime_env={"env_vars": self._variables()})
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel what still runs, and leave the cluster as it was found."""
        for reference in self.running:
            self.ray.cancel(reference, force=True)
        self.running.clear()
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
        reference = self.task.remote(self.run, job, self.threads, os.getcwd())
        self.running[reference] = job.name

    def poll(self, seconds: float) -> list[tuple[str, JobStatus]]:
        """Return the names and endings of jobs that ended; wait at most so long for one."""
        if not self.running:
            time.sleep(seconds)
            return []
        references, _ = self.ray.wait(list(self.running), num_returns=1, timeout=seconds)
        return [(self.running.pop(reference), self._ending(reference)) for reference in references]

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
            raise RunError(f"There is no Ray cluster at {self.address}: {error}") from error
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray would end this process, and nothing would be saved

    def _variables(self) -> dict[str, str]:
        variables = {"OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads)}
        if ENVIRONMENT_VARIABLE in os.environ:
            variables[ENVIRONMENT_VARIABLE] = os.environ[ENVIRONMENT_VARIABLE]
        return variables

    def _check_that_nodes_see_the_runs(self) -> None:
        """Let every node read a file that was written here, and write one that is read here."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        token = uuid.uuid4().hex
        self.runs.mkdir(parents=True, exist_ok=True)
        probe = self.runs / f".probe-{token}"
        probe.write_text(token)
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in self.ray.nodes() if node["Alive"]}
        references = {
            node: self.ray.remote(_probe_on_node)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False), max_retries=0)
            .remote(str(probe), node)
            for node in nodes
        }
        try:
            for node, reference in references.items():
                answer = Path(f"{probe}-{node}")
                if not self._came_back(reference, token) or not answer.exists() or answer.read_text() != token:
                    raise RunError(
                        f"{self.runs} on this machine and on the Ray node {nodes[node]} are not the same directory. It "
                        "has to be on a file system that all nodes share: choose another with --runs."
                    )
        finally:
            for path in self.runs.glob(f"{probe.name}*"):
                path.unlink(missing_ok=True)

    def _came_back(self, reference: Any, token: str) -> bool:
        try:
            return bool(self.ray.get(reference, timeout=PROBE_SECONDS) == token)
        except self.ray.exceptions.RayTaskError as error:
            raise RunError(
                f"A Ray node cannot run flatmin: {describe(error.cause or error)}. Every node needs the same flatmin "
                "as this machine."
            ) from error
        except self.ray.exceptions.RayError as error:
            raise RunError(f"A Ray node does not answer: {error}") from error


def _probe_on_node(probe: str, node: str) -> str | None:
    try:
        token = Path(probe).read_text()
        Path(f"{probe}-{node}").write_text(token)
    except OSError:
        return None
    return token


def _run_on_node(run: Callable[[Job], JobStatus], job: Job, threads: int, directory: str) -> JobStatus:
    if Path(directory).is_dir():
        os.chdir(directory)  # relative paths in the spec mean what they mean where the sweep was started
    torch.set_num_threads(threads)
    status = run(job)
    if status.is_device_broken:
        os._exit(1)  # Ray would give this process the next job
    return status
