"""Labels that a first model predicted, on which a second one is trained from scratch (Section 3.3)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flatmin.lab.data.datasets import Dataset
from flatmin.lab.errors import CorruptFileError, RunError
from flatmin.lab.runs.json_files import read_json, write_json

FILE = "predicted_labels.json"


def predicted_labels(run: Path, dataset: Dataset, predict: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the labels that the first model predicts for the training set of a run.

    They are saved in the run's directory: a resumed run sees the same labels.
    """
    if not (run / FILE).exists():
        labels = predict()
        content = {"num_changed": int((dataset.train.labels != labels).sum()), "labels": labels.tolist()}
        write_json(run / FILE, content, indent=None)
    return read_predicted_labels(run, dataset)


def read_predicted_labels(run: Path, dataset: Dataset) -> NDArray[np.int64]:
    """Return the labels that were predicted for the training set of a run, as `load_dataset` returns it.

    Raises:
        RunError: the labels are missing.
        CorruptFileError: they were changed, or belong to another run or training set.
    """
    try:
        labels: NDArray[np.int64] = np.array(read_json(run / FILE)["labels"], dtype=np.int64)
    except FileNotFoundError:
        raise RunError(
            f"{run / FILE} is missing. Delete result.json and rerun the training command, which predicts the labels "
            "again."
        ) from None
    if labels.shape != dataset.train.labels.shape:
        raise CorruptFileError(
            run / FILE, f"it does not have one label for each of {len(dataset.train.labels)} examples"
        )
    return labels


def relabeled(dataset: Dataset, labels: NDArray[np.int64]) -> Dataset:
    """Return the dataset with other training labels; validation and test sets keep theirs.

    ``flipped`` still says which labels were made noisy, although the predictions may have corrected them.
    """
    return replace(dataset, train=dataset.train.take(np.arange(len(labels)), labels))
