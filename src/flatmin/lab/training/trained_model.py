"""A trained model with its data, read from the directory of its run, to be measured, fine-tuned, or to label data."""

import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flatmin.lab.data.datasets import Dataset, load_dataset
from flatmin.lab.data.images import Images
from flatmin.lab.data.pipeline import Pipeline
from flatmin.lab.errors import CorruptFileError, ModelError, RunError
from flatmin.lab.models.build import build_model, input_statistics
from flatmin.lab.runs.checkpoint import State, find_state, latest_checkpoint, read_state
from flatmin.lab.runs.directory import is_finished, last_metrics, read_result, read_spec
from flatmin.lab.runs.environment import check_inputs
from flatmin.lab.runs.json_files import read_json
from flatmin.lab.spec.datasets import DatasetInfo
from flatmin.lab.spec.experiment import Experiment, Model
from flatmin.lab.training.distributed import Workers

RUN_PREFIX = "run:"
PREDICTED_LABELS = "predicted_labels.json"


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model as its run left it, in evaluation mode, and the dataset it was trained on."""

    directory: Path
    experiment: Experiment
    network: nn.Module
    dataset: Dataset
    pipeline: Pipeline
    epoch: int
    """How many epochs it was trained for."""
    step: int | None
    """... and how many steps; None for weights that were saved along training."""

    @property
    def rho(self) -> float:
        """SAM's radius: the spec's, or what the run measured before its first step."""
        rho = self.experiment.optim.rho
        measured = rho if isinstance(rho, float) else last_metrics(self.directory).get("rho")
        if measured is None:
            raise RunError(f"{self.directory} has no completed epoch, so its radius (optim.rho={rho}) is not recorded.")
        return measured

    def at_epoch(self, epoch: int | None) -> "TrainedModel":
        """Return the model after another epoch (the latest if None), whose weights the run saved."""
        network = copy.deepcopy(self.network)
        loaded = _load_weights(network, self.directory, epoch)
        return replace(self, network=network, epoch=loaded["epoch"], step=loaded.get("step"))

    def batches(
        self, images: Images, num_examples: int | None = None, batch_size: int = 500
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the first ``num_examples`` examples (all if None) of a part of the dataset, not augmented.

        Training examples have the labels they were trained with, which may be noisy.
        """
        batches: list[tuple[Tensor, Tensor]] = []
        for batch in self.pipeline.evaluation(images.take(np.arange(len(images.labels))[:num_examples])):
            batches += zip(batch.inputs.split(batch_size), batch.labels.split(batch_size), strict=True)  # type: ignore[no-untyped-call]
        return batches

    @torch.no_grad()
    def predicted_labels(self) -> NDArray[np.int64]:
        """Return the class that the model gives to each training example, not augmented."""
        batches = self.pipeline.evaluation(self.dataset.train)
        labels: NDArray[np.int64] = torch.cat([self.network(batch.inputs).argmax(1).cpu() for batch in batches]).numpy()
        return labels


def read_predicted_labels(run: Path, dataset: Dataset) -> NDArray[np.int64]:
    """Return the labels that were predicted for the training set of a run, as `load_dataset` returns it."""
    try:
        labels: NDArray[np.int64] = np.array(read_json(run / PREDICTED_LABELS)["labels"], dtype=np.int64)
    except FileNotFoundError:
        fix = "Delete result.json and rerun the training command, which predicts the labels again."
        raise RunError(f"{run / PREDICTED_LABELS} is missing. {fix}") from None
    if labels.shape != dataset.train.labels.shape:
        raise CorruptFileError(
            run / PREDICTED_LABELS, f"it does not have one label for each of {len(dataset.train.labels)} examples"
        )
    return labels


def relabeled(dataset: Dataset, labels: NDArray[np.int64]) -> Dataset:
    """Return the dataset with other training labels; validation and test sets keep theirs.

    ``flipped`` still says which labels were made noisy, although the predictions may have corrected them.
    """
    return replace(dataset, train=dataset.train.take(np.arange(len(labels)), labels))


def with_weights_file(model: Model, runs: Path) -> Model:
    """Return the model with a file as its checkpoint if that is another run of the same directory (``run:NAME``).

    A ModelError says that there is no such run, that it is not finished, or that its final weights cannot be used.
    """
    if model.checkpoint is None or not model.checkpoint.startswith(RUN_PREFIX):
        return model
    run = runs / model.checkpoint.removeprefix(RUN_PREFIX)
    if not is_finished(run):
        raise ModelError(
            f"model.checkpoint is {model.checkpoint}, but there is no finished run {run}. Train it first, or choose "
            "the directory it is in with --runs."
        )
    try:
        return replace(model, checkpoint=str(_final_weights(run)[0]))
    except RunError as error:
        raise ModelError(f"model.checkpoint is {model.checkpoint}: {error}") from error


def model_pipeline(
    network: nn.Module, experiment: Experiment, info: DatasetInfo, seed: int, workers: Workers
) -> Pipeline:
    """Return what makes one worker's batches, normalized as the model expects it, or else the dataset."""
    mean, std = input_statistics(network) or (info.mean, info.std)
    return Pipeline(
        data=experiment.data,
        info=info,
        mean=mean[: info.channels],
        std=std[: info.channels],
        seed=seed,
        device=workers.device,
        worker=workers.rank,
        num_workers=workers.count,
    )


def load_trained(path: Path, *, data_root: Path | None = None, epoch: int | None = None) -> TrainedModel:
    """Read a run's model and dataset; the run need not be finished.

    The weights are those after an epoch that the run saved (``keep_every``); the latest if None. A RunError says why
    they, or the images, cannot be used.
    """
    try:
        experiment = read_spec(path)
    except FileNotFoundError:
        raise RunError(f"{path} is not the directory of a run: it has no spec.json.") from None
    dataset = load_dataset(experiment.data, data_root=data_root)
    check_inputs(path, dataset)
    if experiment.data.bootstrap:
        dataset = relabeled(dataset, read_predicted_labels(path, dataset))
    info = dataset.info
    # The weights come from the run; the file it started from need not exist any more.
    model = experiment.model.without_checkpoint()
    network = build_model(model, num_classes=info.num_classes, in_channels=info.channels)
    state = _load_weights(network, path, epoch)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network.to(device).eval()
    return TrainedModel(
        directory=path,
        experiment=experiment,
        network=network,
        dataset=dataset,
        pipeline=model_pipeline(network, experiment, info, 0, Workers(device=device)),
        epoch=state["epoch"],
        step=state.get("step"),
    )


def _load_weights(network: nn.Module, run: Path, epoch: int | None) -> State:
    """Load the weights that a run saved into a model, and return all that was saved with them."""
    if epoch is not None:
        path = find_state(run / "weights", f"epoch-{epoch:06d}")
        if path is None:
            raise RunError(f"{run} has not saved its weights after epoch {epoch}: train with keep_every.")
        state = _read_weights(path, {"epoch": epoch}, "Measure another epoch, or train the run again.")
    elif is_finished(run):
        _, state = _final_weights(run)  # an earlier checkpoint is another model than the result's
    else:
        latest = latest_checkpoint(run / "checkpoints", partial(_check_weights, network))
        if latest is None:
            raise RunError(f"{run} has no intact checkpoint: there is nothing to measure. Train it again.")
        state = latest
    try:
        _check_weights(network, state)
    except ValueError as error:
        raise RunError(f"The weights of {run} cannot be loaded: {error}. Train the run again.") from None
    network.load_state_dict(state["model"])
    return state


def _check_weights(network: nn.Module, state: State) -> None:
    """Raise a ValueError if a state does not have the weights of a model."""
    weights, own = state.get("model"), network.state_dict()
    if not isinstance(weights, dict) or _kinds(weights) != _kinds(own):
        raise ValueError("they belong to another model")


def _kinds(weights: dict[str, Any]) -> dict[str, object]:
    return {n: (t.shape, t.dtype) if isinstance(t, Tensor) else None for n, t in weights.items()}


def _final_weights(run: Path) -> tuple[Path, State]:
    """Return the checkpoint that a finished run ended with, and its file."""
    metrics = read_result(run).metrics
    end = {name: int(metrics[name] or 0) for name in ("epoch", "step")}
    kept = sorted({int(found.name.split("-")[1]) for found in (run / "weights").glob("epoch-*.pt")})
    others = f"; or measure weights along training with --epoch (kept: {', '.join(map(str, kept))})" if kept else ""
    fix = (
        f"It has the final weights of the run. To train them again delete {run / 'result.json'} and rerun the "
        f"training command, which resumes from the checkpoint before{others}."
    )
    stem = f"step-{end['step']:08d}"
    path = find_state(run / "checkpoints", stem)
    if path is None:
        raise RunError(f"{run}/checkpoints/{stem}-*.pt is missing. {fix}")
    return path, _read_weights(path, end, fix)


def _read_weights(path: Path, expected: dict[str, int], fix: str) -> State:
    try:
        state = read_state(path)
        if any(state.get(name) != value for name, value in expected.items()):
            raise ValueError(f"it is not of {' and '.join(f'{name} {value}' for name, value in expected.items())}")
    except ValueError as error:
        raise RunError(f"{path} is corrupt ({error}). {fix}") from None
    return state
