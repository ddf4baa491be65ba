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
        CorruptFileError: they are not those that were predicted for this training set.
    """
    given = dataset.train.labels
    try:
        content = read_json(run / FILE)
        labels: NDArray[np.int64] = np.array(content["labels"])
        if labels.dtype != np.int64 or labels.shape != given.shape:
            raise ValueError(f"it does not have one label for each of {len(given)} examples")
        if labels.min() < 0 or labels.max() >= dataset.info.num_classes:
            raise ValueError(f"a label is not one of {dataset.info.num_classes} classes")
        if content["num_changed"] != (labels != given).sum():
            raise ValueError("its labels are not those it was written with")
        return labels
    except FileNotFoundError:
        raise RunError(
            f"{run / FILE} is missing. Delete result.json and rerun the training command, which predicts the labels "
            "again."
        ) from None
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise CorruptFileError(run / FILE, error) from None


def relabeled(dataset: Dataset, labels: NDArray[np.int64]) -> Dataset:
    """Return the dataset with other training labels; validation and test sets keep theirs.

    ``flipped`` still says which labels were made noisy, although the predictions may have corrected them.
    """
    return replace(dataset, train=dataset.train.take(np.arange(len(labels)), labels))
