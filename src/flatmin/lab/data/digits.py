"""The embedded dataset: 1,797 handwritten digits, 8 x 8 pixels, 45 kB.

Source: "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998), UCI Machine Learning
Repository, https://doi.org/10.24432/C50P49, licensed under CC BY 4.0; the part that scikit-learn distributes.
Each pixel counts the dark pixels (0 to 16) of a 4 x 4 block of the scanned image.
"""

from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from flatmin.lab.data.randomness import Purpose, permutation

NUM_TEST = 500


def load_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return all images (1797, 1, 8, 8), scaled to 0 .. 255, and their classes (1797,)."""
    with files(__package__).joinpath("digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    return (images[:, None].astype(np.int64) * 255 // 16).astype(np.uint8), labels.astype(np.int64)


def digits_test_indices(size: int = 1797) -> NDArray[np.int64]:
    """Return which 500 digits are the test set; the source has no split of this part, so this one is ours."""
    return np.sort(permutation(size, 0, Purpose.DIGITS_TEST)[:NUM_TEST])
