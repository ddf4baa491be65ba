"""The order of the examples, their division among workers, and the way from bytes to a batch.

The global batches of an epoch depend only on the seed. With W workers each takes its part of every global
batch, so no example is lost or seen twice, whatever W is.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatmin.lab.data import augment
from flatmin.lab.data.augment import Draw, copy_together
from flatmin.lab.data.images import FileImages, Images
from flatmin.lab.data.randomness import Purpose, permutation
from flatmin.lab.spec.datasets import DatasetInfo
from flatmin.lab.spec.experiment import Data

EVALUATION_BATCH = 500  # small images; of large ones, as many as in training


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One worker's part of a global batch."""

    number: int
    """Which batch of the epoch."""
    examples: NDArray[np.int64]
    """The numbers of its examples in the dataset."""
    inputs: Tensor
    """(n, C, H, W), float32."""
    labels: Tensor
    """(n,), int64."""
    partner_labels: Tensor
    """(n,), the classes of the images that Mixup mixed in; equal to ``labels`` without."""
    own_weight: float = 1.0
    """Mixup's lambda: the part that ``labels`` have in image and loss; 1 without."""
    share: float = 1.0
    """n times the number of workers, divided by the size of the global batch."""

    def split(self, parts: int) -> "list[Batch]":
        """Return micro-batches of equal size (to within one); their shares add up to ``share``."""
        return [self.slice(a, b) for a, b in pairwise(even_cuts(len(self.examples), parts))]

    def slice(self, start: int, stop: int) -> "Batch":
        """Return some of its examples, with their part of the share."""
        names = ("examples", "inputs", "labels", "partner_labels")
        parts = {name: getattr(self, name)[start:stop] for name in names}
        return replace(self, **parts, share=self.share * (stop - start) / len(self.examples))


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Makes batches of a set of images, for one worker of several."""

    data: Data
    info: DatasetInfo
    mean: tuple[float, ...]
    std: tuple[float, ...]
    seed: int
    """The run's seed: order and augmentation."""
    device: torch.device
    worker: int = 0
    num_workers: int = 1

    def training(self, images: Images, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, from batch number ``start`` on, shuffled and augmented."""
        batches = epoch_batches(len(images.labels), self.data, self.seed, epoch)
        jobs = [partial(self._training_batch, images, epoch, n, batches[n]) for n in range(start, len(batches))]
        return self._prepared(images, jobs)

    def evaluation(self, images: Images) -> Iterator[Batch]:
        """Yield this worker's part of a set, in order, each example once, without augmentation."""
        cuts = even_cuts(len(images.labels), self.num_workers)
        mine = np.arange(cuts[self.worker], cuts[self.worker + 1])
        small = self.info.in_memory and self.data.image_size is None
        size = EVALUATION_BATCH if small else max(1, self.data.batch_size // self.num_workers)
        starts = range(0, len(mine), size)
        jobs = [partial(self._evaluation_batch, images, n, mine[a : a + size]) for n, a in enumerate(starts)]
        return self._prepared(images, jobs)

    def _prepared(self, images: Images, jobs: Sequence[Callable[[], Batch]]) -> Iterator[Batch]:
        # On the CPU, batches in memory are ready in no time, and a thread would take a core from the model.
        ahead = isinstance(images, FileImages) or self.device.type != "cpu"
        return _made_ahead(jobs) if ahead else (job() for job in jobs)

    def _evaluation_batch(self, images: Images, number: int, examples: NDArray[np.int64]) -> Batch:
        pixels = images.fetch(Draw(seed=self.seed, epoch=0, examples=examples), augment=False)
        pixels, labels = copy_together([pixels, _labels(images, examples)], self.device)
        inputs = self._resized(augment.normalize(pixels, self.mean, self.std))
        return Batch(number=number, examples=examples, inputs=inputs, labels=labels, partner_labels=labels)

    def _training_batch(self, images: Images, epoch: int, number: int, examples: NDArray[np.int64]) -> Batch:
        cuts = even_cuts(len(examples), self.num_workers)
        mine = slice(cuts[self.worker], cuts[self.worker + 1])
        own = examples[mine]
        weight = augment.mixup_weight(self.data.mixup, self.seed, epoch, number)
        if weight == 1.0:
            partners, needed, places = own, own, np.arange(len(own))
        else:
            # Partners come from the global batch: the mixtures do not depend on the number of workers.
            partners = examples[permutation(len(examples), self.seed, Purpose.MIXUP_PARTNER, epoch, number)][mine]
            needed, places = np.unique(np.concatenate([own, partners]), return_inverse=True)
        host = [_labels(images, own), _labels(images, partners), torch.from_numpy(places)]
        inputs, (labels, partner_labels, indices) = self._augmented(
            images, Draw(seed=self.seed, epoch=epoch, examples=needed), host
        )
        if weight != 1.0:
            own_places, partner_places = indices.view(2, -1)
            inputs = inputs[own_places].mul_(weight).add_(inputs[partner_places], alpha=1 - weight)
        return Batch(
            number=number,
            examples=own,
            inputs=inputs,
            labels=labels,
            partner_labels=partner_labels,
            own_weight=weight,
            share=len(own) * self.num_workers / len(examples),
        )

    def _augmented(self, images: Images, draw: Draw, others: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return augmented images and the other tensors on the device: all that goes there goes in one copy."""
        kind = self.data.augment
        is_cut = kind in ("flip", "basic", "cutout") or (kind == "autoaugment" and self.info.policy != "svhn")
        is_masked = kind in ("cutout", "autoaugment")
        padding = 0 if kind == "flip" else augment.PADDING
        pixels = images.fetch(draw, augment=True)
        size = pixels.shape[-2:]
        crops = centers = members = torch.empty(0, dtype=torch.int64)
        if is_cut:
            crops = augment.draw_crops(draw, padding)
        if is_masked:
            centers = augment.draw_cutouts(draw, *size, shared=self.data.cutout_shared)
        if kind == "autoaugment":
            from flatmin.lab.data.autoaugment import auto_augment, draw_operations  # torchvision is slow to import

            groups, members = draw_operations(draw, self.info.policy, size)
        pixels, crops, centers, members, *moved = copy_together([pixels, crops, centers, members, *others], self.device)
        if is_cut:
            pixels = augment.flip_and_crop(pixels, crops, padding)
        if kind == "autoaugment":
            pixels = auto_augment(pixels, groups, members)
        inputs = augment.normalize(pixels, self.mean, self.std)
        if is_masked:
            inputs = augment.cutout(inputs, centers, self.data.cutout_size)
        return self._resized(inputs), moved

    def _resized(self, inputs: Tensor) -> Tensor:
        return augment.resize(inputs, self.data.image_size, self.data.resize) if self.data.image_size else inputs


def _labels(images: Images, examples: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(images.labels[examples])


def _made_ahead(jobs: Sequence[Callable[[], Batch]]) -> Iterator[Batch]:
    """Yield the batches in order; the next one is prepared by a thread while the model works on the one before."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch") as ahead:
        future = None
        for job in jobs:
            following = ahead.submit(job)
            if future is not None:
                yield future.result()
            future = following
        if future is not None:
            yield future.result()


def epoch_batches(size: int, data: Data, seed: int, epoch: int) -> list[NDArray[np.int64]]:
    """Return the examples of each global batch of an epoch.

    Every example is in exactly one batch, and the sizes of batches differ by at most one; with ``drop_last``
    all have exactly ``batch_size`` examples and the remainder is left out of this epoch.
    """
    order = permutation(size, seed, Purpose.ORDER, epoch)
    if data.drop_last and size >= data.batch_size:
        cuts = list(range(0, size + 1, data.batch_size))
    else:
        cuts = even_cuts(size, -(-size // data.batch_size))
    return [order[a:b] for a, b in pairwise(cuts)]


def even_cuts(size: int, parts: int) -> list[int]:
    """Return where to cut ``size`` things into parts whose sizes differ by at most one.

    Example:
        >>> even_cuts(10, 4)
        [0, 2, 5, 7, 10]
    """
    return [size * i // parts for i in range(parts + 1)]
