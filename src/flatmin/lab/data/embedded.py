"""The datasets that need no files: handwritten digits, embedded here, and the text that ships with Python."""

import re
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
"""The classes, in the order of their codes; any other character of the text becomes a question mark."""
CONTEXT = 64
NUM_TRAIN, NUM_TEST = 20_000, 5_000
TEST_EVERY = 4
RULE = re.compile(r"[-=*]{5}")
"""Paragraphs with a drawn line, of a heading or a table, are left out."""


def load_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return 1,797 handwritten digits (1797, 1, 8, 8), scaled to 0 .. 255, and their classes (1797,).

    Source: "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998), UCI Machine Learning
    Repository, https://doi.org/10.24432/C50P49, licensed under CC BY 4.0; the part that scikit-learn distributes.
    Each pixel counts the dark pixels (0 to 16) of a 4 x 4 block of the scanned image.
    """
    with files(__package__).joinpath("digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    return (images[:, None].astype(np.int64) * 255 // 16).astype(np.uint8), labels.astype(np.int64)


def load_python_text(train: bool) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return texts (N, 1, 8, 8) and the characters that follow them (N,), of Python's reference (``help("topics")``).

    An example is 64 characters, stored as an image of 8 x 8 pixels whose values are the characters' codes; its class is
    the next character. The text differs between versions of Python: runs on it compare within one version only. Topics
    quote each other, so each paragraph counts once, where it stands first; every fourth topic is for testing.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    chosen: list[str] = []
    for number, name in enumerate(sorted(topics)):
        paragraphs = {" ".join(paragraph.split()): paragraph for paragraph in topics[name].split("\n\n")}
        new = [text for words, text in paragraphs.items() if words not in seen and not RULE.search(text)]
        seen |= paragraphs.keys()
        chosen += new if (number % TEST_EVERY == 0) != train else []
    code_of = {character: code for code, character in enumerate(CHARACTERS)}
    codes = np.array([code_of.get(c, code_of["?"]) for c in "\n\n".join(chosen)], dtype=np.uint8)
    starts = np.linspace(0, len(codes) - CONTEXT - 1, NUM_TRAIN if train else NUM_TEST).astype(np.int64)
    windows = codes[starts[:, None] + np.arange(CONTEXT)]
    return windows.reshape(-1, 1, 8, 8), codes[starts + CONTEXT].astype(np.int64)
