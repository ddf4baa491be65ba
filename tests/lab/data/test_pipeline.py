"""Order, division among workers, and what a batch holds."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flatmin.lab.data import augment
from flatmin.lab.data.datasets import load_dataset
from flatmin.lab.data.images import MemoryImages
from flatmin.lab.data.pipeline import Pipeline, epoch_batches, even_cuts
from flatmin.lab.spec.datasets import dataset_info
from flatmin.lab.spec.experiment import Data


def a_pipeline(data, worker=0, num_workers=1, seed=0):
    info, cpu = dataset_info(data.name), torch.device("cpu")
    where = {"seed": seed, "device": cpu, "worker": worker, "num_workers": num_workers}
    return Pipeline(data=data, info=info, mean=info.mean, std=info.std, **where)


@pytest.mark.parametrize(("size", "batch"), [(1000, 128), (500, 128), (7, 128), (256, 128), (1297, 100)])
def test_every_example_is_in_exactly_one_batch_and_the_batches_are_equally_large(size, batch):
    batches = epoch_batches(size, Data(batch_size=batch), seed=0, epoch=0)
    assert sorted(np.concatenate(batches).tolist()) == list(range(size))
    sizes = [len(b) for b in batches]
    assert max(sizes) <= batch
    assert max(sizes) - min(sizes) <= 1


def test_drop_last_gives_full_batches_only():
    batches = epoch_batches(1000, Data(batch_size=128, drop_last=True), seed=0, epoch=0)
    assert [len(b) for b in batches] == [128] * 7
    assert len(set(np.concatenate(batches).tolist())) == 896


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [np.concatenate(epoch_batches(500, Data(), seed, epoch)).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("mixup", [0.0, 1.0])
def test_workers_together_see_what_one_sees_image_by_image(workers, mixup):
    """No example is lost or seen twice, and its augmentation and mixture do not depend on the number of workers."""
    data = Data(augment="basic", mixup=mixup, batch_size=100, train_size=331)
    images = load_dataset(data).train
    one = list(a_pipeline(data).training(images, epoch=2))
    parts = [list(a_pipeline(data, w, workers).training(images, epoch=2)) for w in range(workers)]
    for number, batch in enumerate(one):
        mine = [part[number] for part in parts]
        assert torch.equal(torch.cat([m.inputs for m in mine]), batch.inputs)
        assert torch.equal(torch.cat([m.labels for m in mine]), batch.labels)
        assert torch.equal(torch.cat([m.partner_labels for m in mine]), batch.partner_labels)
        assert {m.own_weight for m in mine} == {batch.own_weight}
        for m in mine:
            assert m.share == pytest.approx(len(m.examples) * workers / len(batch.examples))
    assert sorted(np.concatenate([b.examples for b in one]).tolist()) == list(range(331))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_evaluation_sees_each_example_once_in_order_and_unchanged(workers):
    data = Data(batch_size=100)
    images = load_dataset(data).test
    batches = [b for w in range(workers) for b in a_pipeline(data, w, workers).evaluation(images)]
    assert np.concatenate([b.examples for b in batches]).tolist() == list(range(500))
    expected = (images.pixels.float() / 255 - 0.3045) / 0.3760
    torch.testing.assert_close(torch.cat([b.inputs for b in batches]), expected)


def test_an_epoch_can_be_entered_in_the_middle():
    data = Data(augment="cutout", cutout_size=3, mixup=0.5, batch_size=100, train_size=500)
    images = load_dataset(data).train
    whole = list(a_pipeline(data).training(images, epoch=1))
    rest = list(a_pipeline(data).training(images, epoch=1, start=3))
    assert [b.number for b in rest] == [3, 4]
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(whole[3:], rest, strict=True))


def test_mixup_mixes_each_image_with_its_partner_by_the_batchs_weight():
    plain, mixed = Data(augment="none", batch_size=50), Data(augment="none", mixup=1.0, batch_size=50)
    images = load_dataset(plain).train
    batch = next(iter(a_pipeline(mixed).training(images, epoch=0)))
    unmixed = next(iter(a_pipeline(plain).training(images, epoch=0)))
    assert 0 < batch.own_weight < 1
    residual = (batch.inputs - batch.own_weight * unmixed.inputs) / (1 - batch.own_weight)
    distances = torch.cdist(residual.flatten(1), unmixed.inputs.flatten(1))
    partner = distances.argmin(1)
    assert distances.min(1).values.max() < 1e-2
    assert sorted(partner.tolist()) == list(range(len(partner)))  # a permutation of the batch
    assert torch.equal(unmixed.labels[partner], batch.partner_labels)


def test_svhn_gets_its_policy_without_flip_and_crop():
    """An image whose policy does nothing to it comes out unmoved, as in the reference code."""
    pixels = torch.arange(64 * 3 * 32 * 32).remainder(251).to(torch.uint8).reshape(64, 3, 32, 32)
    images = MemoryImages(pixels=pixels, labels=np.zeros(64, dtype=np.int64))

    def unmoved(name):
        data = Data(name=name, augment="autoaugment", cutout_size=1, batch_size=64)
        batch = next(iter(a_pipeline(data).training(images, epoch=0)))
        plain = next(iter(a_pipeline(Data(name=name, augment="none", batch_size=64)).training(images, epoch=0)))
        return sum(int((a != b).sum() <= 3) for a, b in zip(batch.inputs, plain.inputs, strict=True))

    assert unmoved("svhn") >= 2
    assert unmoved("cifar10") == 0


def test_flip_mirrors_about_half_of_the_images_and_moves_none():
    data = Data(augment="flip", batch_size=200)
    images = load_dataset(data).train
    batch = next(iter(a_pipeline(data).training(images, epoch=0)))
    plain = next(iter(a_pipeline(replace(data, augment="none")).training(images, epoch=0)))
    assert (batch.examples == plain.examples).all()
    same = (batch.inputs == plain.inputs).flatten(1).all(1)
    mirrored = (batch.inputs == plain.inputs.flip(-1)).flatten(1).all(1)
    assert (same | mirrored).all()
    assert 60 <= int((mirrored & ~same).sum()) <= 140


def test_image_size_resizes_after_augmentation():
    data = Data(augment="basic", image_size=16, batch_size=32)
    batch = next(iter(a_pipeline(data).training(load_dataset(data).train, epoch=0)))
    assert batch.inputs.shape[1:] == (1, 16, 16)
    bicubic = replace(data, resize="bicubic")
    other = next(iter(a_pipeline(bicubic).training(load_dataset(data).train, epoch=0)))
    assert other.inputs.shape == batch.inputs.shape
    assert not torch.equal(other.inputs, batch.inputs)


def test_micro_batches_are_equal_parts_in_order():
    data = Data(batch_size=50)
    batch = next(iter(a_pipeline(data).training(load_dataset(data).train, epoch=0)))
    parts = batch.split(4)
    assert torch.equal(torch.cat([p.inputs for p in parts]), batch.inputs)
    assert max(len(p.examples) for p in parts) - min(len(p.examples) for p in parts) <= 1
    assert sum(p.share for p in parts) == pytest.approx(batch.share)


def test_even_cuts_differ_by_at_most_one():
    for size in range(1, 40):
        for parts in range(1, size + 1):
            sizes = np.diff(even_cuts(size, parts))
            assert sizes.sum() == size
            assert sizes.max() - sizes.min() <= 1


class CountCopies(TorchDispatchMode):
    """Counts copies from the host to a device."""

    def __init__(self):
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function.overloadpacket.__name__ == "_to_copy" and args[0].device.type == "cpu" != result.device.type:
            self.copies += 1
        return result


@pytest.mark.parametrize(
    "changes",
    [
        {"augment": "none"},
        {"augment": "basic"},
        {"augment": "cutout", "mixup": 0.5},
        {"augment": "autoaugment", "cutout_shared": True},
        {"augment": "autoaugment", "name": "svhn"},
    ],
    ids=str,
)
def test_a_device_gets_one_copy_per_batch(changes):
    """Images, labels and all that was drawn go together, whatever is done with them there."""
    data = Data(**{"name": "cifar10", "batch_size": 20, **changes})
    pixels = torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8)
    images = MemoryImages(pixels=pixels, labels=np.zeros(40, dtype=np.int64))
    pipeline = replace(a_pipeline(data), device=torch.device("meta"))
    examples = epoch_batches(40, data, 0, 0)[0]
    pipeline._training_batch(images, 0, 0, examples)  # mean, standard deviation, ways of moving pixels: once per run
    for make in (
        lambda: pipeline._training_batch(images, 0, 0, examples),
        lambda: pipeline._evaluation_batch(images, 0, examples),
    ):
        with CountCopies() as count:
            batch = make()
        assert count.copies == 1
        assert batch.inputs.device.type == batch.labels.device.type == batch.partner_labels.device.type == "meta"


class AnotherDevice(TorchDispatchMode):
    """Keeps data on the CPU that were sent to "meta", so that they can be looked at."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if kwargs and kwargs.get("device") == torch.device("meta"):
            kwargs = kwargs | {"device": torch.device("cpu")}
        return function(*args, **kwargs or {})


def test_tensors_that_are_copied_together_arrive_as_they_were():
    tensors = [
        torch.arange(5, dtype=torch.uint8),
        torch.randn(2, 3, dtype=torch.float64),
        torch.empty(0, dtype=torch.int64),
        torch.arange(24, dtype=torch.uint8).reshape(2, 3, 2, 2),
        torch.tensor([7, -1])[:1].expand(4),
        torch.randn(3),
    ]
    with AnotherDevice():
        moved = augment.copy_together(tensors, torch.device("meta"))
    for before, after in zip(tensors, moved, strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after)


def test_copies_to_a_gpu_come_from_pinned_memory_and_do_not_block(monkeypatch):
    """Without a GPU, only what torch is asked for can be seen."""
    asked = []
    empty, to = torch.empty, torch.Tensor.to
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: asked.append(pin_memory) or empty(*a, **k))

    def record(tensor, device, **settings):
        asked.append((str(device), settings))
        return to(tensor, "cpu")

    monkeypatch.setattr(torch.Tensor, "to", record)
    augment.copy_together([torch.ones(3), torch.ones(2)], torch.device("cuda"))
    assert asked == [True, ("cuda", {"non_blocking": True})]


@pytest.mark.parametrize(("device", "is_ahead"), [("cpu", False), ("meta", True)])
def test_batches_for_a_device_are_prepared_ahead(device, is_ahead, monkeypatch):
    data = Data(train_size=60, batch_size=20, augment="basic")
    images, pipeline = load_dataset(data).train, replace(a_pipeline(data), device=torch.device(device))
    prepare, threads = Pipeline._training_batch, []

    def recorded(self, *arguments):
        threads.append(threading.current_thread().name)
        return prepare(self, *arguments)

    monkeypatch.setattr(Pipeline, "_training_batch", recorded)
    assert [batch.number for batch in pipeline.training(images, 0)] == [0, 1, 2]
    assert all(name.startswith("prefetch") == is_ahead for name in threads)
