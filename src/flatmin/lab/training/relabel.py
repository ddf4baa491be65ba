"""Labels that a first network predicted, on which a second one is trained from scratch (Section 3.3)."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flatmin.lab.data.datasets import Dataset
from flatmin.lab.runs.directory import write_atomic

FILE = "predicted_labels.json"


def write_predicted_labels(run: Path, given: NDArray[np.int64], predicted: NDArray[np.int64]) -> None:
    """Keep the predictions in the directory of the second run: a resumed one has to see the same labels."""
    content = {"num_changed": int((given != predicted).sum()), "labels": predicted.tolist()}
    write_atomic(run / FILE, json.dumps(content) + "\n")


def has_predicted_labels(run: Path) -> bool:
    """Return whether the first network has predicted the labels of a run."""
    return (run / FILE).exists()


def read_predicted_labels(run: Path) -> NDArray[np.int64]:
    """Return the labels that are kept in the directory of a run."""
    return np.array(json.loads((run / FILE).read_text())["labels"], dtype=np.int64)


def relabeled(dataset: Dataset, labels: NDArray[np.int64]) -> Dataset:
    """Return the dataset with other training labels; validation and test sets keep theirs.

    ``flipped`` still says which labels were made noisy, although the predictions may have corrected them.
    """
    return replace(dataset, train=dataset.train.take(np.arange(len(labels)), labels))
