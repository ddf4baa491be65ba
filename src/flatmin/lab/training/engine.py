"""Trains one model: `train(experiment, seed)` from top to bottom.

The same spec and seed give bitwise identical weights and metrics on the same machine with the same number of workers
and threads, however often the run was killed. To that end everything random is a function of (seed, step, example,
worker), and a checkpoint between any two steps holds all the rest.
"""

from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from flatmin.lab.data.datasets import load_dataset
from flatmin.lab.errors import DataError, ModelError, SpecError
from flatmin.lab.runs.directory import Result, RunDirectory, is_finished
from flatmin.lab.runs.environment import IMAGES, WEIGHTS, check_inputs, recorded_inputs
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.training.distributed import Workers, join_workers
from flatmin.lab.training.run import Run
from flatmin.lab.training.session import Callback, deferred_signals, deterministic_algorithms
from flatmin.lab.training.trained_model import with_weights_file

CHECKPOINT_SECONDS = 60.0


def train(
    experiment: Experiment,
    *,
    seed: int = 0,
    runs: Path = Path("runs"),
    data_root: Path | None = None,
    callback: Callback | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    deterministic: bool = False,
) -> Result:
    """Train, evaluate after every epoch, and return the result; resume if an earlier session was interrupted.

    Args:
        experiment: what to train.
        seed: initial weights, order, augmentation and random layers.
        runs: the directory of all runs; this one's is in it, named by ``experiment.run_name(seed)``.
        data_root: the first directory in which datasets are searched for.
        callback: is called at the start and after every step and epoch.
        checkpoint_seconds: how long to train, at most, before saving; 0 saves after every step.
        deterministic: on CUDA, use only deterministic algorithms, which are slower; without it, a repeated or resumed
            run does not end with bitwise identical weights there.

    Returns:
        The result; immediately, if the run is finished.

    Raises:
        SpecError: ``checkpoint_seconds`` is negative or NaN.
        DataError: the dataset is missing or corrupt.
        ModelError: the model or its checkpoint cannot be loaded.
        StorageError: writing failed.
        RunLockedError: another process is working on this run.
        RunError: the directory belongs to another experiment, an input has changed since the run started, or there
            are more workers than examples in a batch.
        DivergedError: the loss became NaN or infinite.
        InterruptedRun: SIGTERM or Ctrl-C arrived; everything is saved.
    """
    if not checkpoint_seconds >= 0:
        raise SpecError(f"checkpoint_seconds must be at least 0 (0 saves after every step); got {checkpoint_seconds}.")
    with deterministic_algorithms(deterministic), join_workers() as workers:
        directory = RunDirectory(experiment, seed, runs)
        if experiment.data.bootstrap and not workers.on_main(lambda: is_finished(directory.path)):
            first_stage = RunDirectory(experiment.first_stage(), seed, runs)
            _train(first_stage, workers, data_root, callback, checkpoint_seconds)
        return _train(directory, workers, data_root, callback, checkpoint_seconds)


def _train(
    directory: RunDirectory, workers: Workers, data_root: Path | None, callback: Callback | None, save_seconds: float
) -> Result:
    """Train one model; one that bootstraps needs its finished first stage."""
    finished = workers.on_main(lambda: _finished(directory, workers.count, data_root))
    if finished is not None:
        return finished  # without the lock: the disk may be read-only
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([workers.device] if workers.device.type == "cuda" else []))
        interruption = stack.enter_context(deferred_signals())
        run = Run(directory, workers, data_root)
        run.stop_if_interrupted(interruption)
        stack.callback(directory.close)  # only the main process opens it
        workers.on_main(lambda: directory.open(workers.count))
        finished = workers.on_main(lambda: directory.result(workers.count))
        if finished is not None:  # by another process, in the meantime
            return finished
        run.resume()
        return run.run_epochs(callback if workers.is_main else None, interruption, save_seconds)


def _finished(directory: RunDirectory, num_workers: int, data_root: Path | None) -> Result | None:
    """Return the result of a finished run whose inputs are unchanged, or gone."""
    path = directory.path
    if not (is_finished(path) and (path / "spec.json").exists()):
        return None
    finished, model = directory.result(num_workers), directory.experiment.model
    recorded = recorded_inputs(path)
    with suppress(DataError):
        if IMAGES in recorded:
            check_inputs(path, load_dataset(directory.experiment.data, data_root=data_root))
    with suppress(ModelError):
        if WEIGHTS in recorded:
            check_inputs(path, None, with_weights_file(model, path.parent).checkpoint)
    return finished
