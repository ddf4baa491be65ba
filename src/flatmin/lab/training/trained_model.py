"""A trained network with its data, read back from the directory of its run, to be measured."""

import copy
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flatmin.lab.data.datasets import Dataset, load_dataset
from flatmin.lab.data.images import Images
from flatmin.lab.data.pipeline import Pipeline
from flatmin.lab.errors import ModelError, RunError
from flatmin.lab.models.build import build_model, input_statistics
from flatmin.lab.runs.checkpoint import checkpoint_of, checkpoints, latest_checkpoint, load_epoch_weights, read_state
from flatmin.lab.runs.directory import is_finished, read_result, read_spec
from flatmin.lab.spec.experiment import Experiment, Model
from flatmin.lab.training.relabel import read_predicted_labels, relabeled

RUN_PREFIX = "run:"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where the weights of a network are from."""

    epoch: int
    """How many epochs it was trained for."""
    step: int | None
    """... and how many steps; None for weights that were kept along training."""
    checksum: str
    """Of their file."""


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A network as its run left it, in evaluation mode, and the dataset it was trained on."""

    directory: Path
    """Of the run."""
    experiment: Experiment
    network: nn.Module
    dataset: Dataset
    pipeline: Pipeline
    origin: Origin

    def at_epoch(self, epoch: int | None) -> "TrainedModel":
        """Return the network as it was after another epoch (the latest if None), with the same dataset.

        Raises:
            RunError: the run has not kept these weights.
        """
        network = copy.deepcopy(self.network)
        weights, origin = _read_weights(self.directory, epoch)
        network.load_state_dict(weights)
        return replace(self, network=network, origin=origin)

    def training_batches(self, num_examples: int | None = None, batch_size: int = 500) -> list[tuple[Tensor, Tensor]]:
        """Return training examples, not augmented, with the labels they were trained with (noise included).

        Args:
            num_examples: the first so many; all if None.
            batch_size: the largest number of examples in one batch.
        """
        return self._batches(self.dataset.train, num_examples, batch_size)

    def test_batches(self, num_examples: int | None = None, batch_size: int = 500) -> list[tuple[Tensor, Tensor]]:
        """Return the first ``num_examples`` test examples with their labels; all if None."""
        return self._batches(self.dataset.test, num_examples, batch_size)

    def _batches(self, images: Images, num_examples: int | None, batch_size: int) -> list[tuple[Tensor, Tensor]]:
        batches: list[tuple[Tensor, Tensor]] = []
        left = len(images.labels) if num_examples is None else num_examples
        for batch in self.pipeline.evaluation(images):
            for inputs, labels in zip(batch.inputs.split(batch_size), batch.labels.split(batch_size), strict=True):  # type: ignore[no-untyped-call]
                if left > 0:
                    batches.append((inputs[:left], labels[:left]))
                    left -= len(labels)
        return batches

    @torch.no_grad()
    def predicted_labels(self) -> NDArray[np.int64]:
        """Return the class that the network gives to each training example, not augmented."""
        logits = [self.network(batch.inputs) for batch in self.pipeline.evaluation(self.dataset.train)]
        labels: NDArray[np.int64] = torch.cat(logits).argmax(1).cpu().numpy()
        return labels


def with_weights_file(model: Model, runs: Path) -> Model:
    """Return the model with a file as its checkpoint where that is another run of a folder (``run:NAME``).

    Raises:
        ModelError: there is no such run, or it has no checkpoint.
    """
    if model.checkpoint is None or not model.checkpoint.startswith(RUN_PREFIX):
        return model
    folder = runs / model.checkpoint.removeprefix(RUN_PREFIX) / "checkpoints"
    found = checkpoints(folder) if folder.is_dir() else []
    if not found:
        raise ModelError(
            f"model.checkpoint is {model.checkpoint}, but there is no checkpoint in {folder}. Train that run first, or "
            "choose the folder it is in with --runs."
        )
    return replace(model, checkpoint=str(found[0]))


def load_trained(path: Path, *, data_root: Path | None = None, epoch: int | None = None) -> TrainedModel:
    """Read a run's network and dataset; the run need not be finished.

    Args:
        path: the run's directory.
        data_root: the first folder in which the dataset is looked for.
        epoch: take the weights after this epoch, which the run kept (``keep_every``); the latest if None.

    Raises:
        RunError: there is no run, it has no whole checkpoint, or it is finished and its last checkpoint is damaged.
        DataError: the dataset is missing or damaged.
    """
    try:
        experiment = read_spec(path)
    except FileNotFoundError:
        raise RunError(f"{path} is not the directory of a run: it has no spec.json.") from None
    weights, origin = _read_weights(path, epoch)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataset = load_dataset(experiment.data, data_root=data_root)
    if experiment.data.bootstrap:
        dataset = relabeled(dataset, read_predicted_labels(path))
    info = dataset.info
    # The weights come from the run, so that the file it started from need not exist any more.
    model = experiment.model.without_checkpoint()
    network = build_model(model, num_classes=info.num_classes, in_channels=info.channels)
    network.load_state_dict(weights)
    network.to(device).eval()
    mean, std = input_statistics(network) or (info.mean, info.std)
    pipeline = Pipeline(
        data=experiment.data,
        info=info,
        mean=mean[: info.channels],
        std=std[: info.channels],
        seed=0,
        device=device,
    )
    return TrainedModel(
        directory=path, experiment=experiment, network=network, dataset=dataset, pipeline=pipeline, origin=origin
    )


def _read_weights(path: Path, epoch: int | None) -> tuple[dict[str, Tensor], Origin]:
    content = _saved_weights(path, epoch)
    state = read_state(content, torch.device("cpu"))
    origin = Origin(
        epoch=state["epoch"] if epoch is None else epoch,
        step=state.get("step"),
        checksum=hashlib.sha256(content).hexdigest(),
    )
    return state["model"], origin


def _saved_weights(path: Path, epoch: int | None) -> bytes:
    folder = path / "checkpoints"
    if epoch is not None:
        content = load_epoch_weights(path / "weights", epoch)
        if content is None:
            raise RunError(f"{path} has not kept its weights after epoch {epoch}: train with keep_every.")
    elif is_finished(path):
        # An earlier checkpoint is another network, perhaps an untrained one, than the run's results are of.
        step = int(read_result(path).metrics["step"] or 0)
        content = checkpoint_of(folder, step)
        if content is None:
            raise RunError(_lost_weights(path, step))
    else:
        content = latest_checkpoint(folder) if folder.is_dir() else None
        if content is None:
            raise RunError(f"{path} has no whole checkpoint: there is nothing to measure. Train it again.")
    return content


def _lost_weights(path: Path, step: int) -> str:
    file = next((path / "checkpoints").glob(f"step-{step:08d}-*.pt"), None)
    lost = f"{path}/checkpoints/step-{step:08d}-*.pt is missing" if file is None else f"{file} is damaged"
    kept = sorted({int(found.name.split("-")[1]) for found in (path / "weights").glob("epoch-*.pt")})
    others = f"; or measure weights along training with --epoch (kept: {', '.join(map(str, kept))})" if kept else ""
    return (
        f"{lost}: it has the weights with which the run ended. To train them again delete {path / 'result.json'} and "
        f"run the training command, which goes on from the checkpoint before{others}."
    )
