"""Finding, checking, reading and splitting datasets; small fakes stand in for the large ones."""

import gzip
import io
import json
import os
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image

from flatmin.lab.data import datasets as datasets_module
from flatmin.lab.data import roots
from flatmin.lab.data.augment import Draw
from flatmin.lab.data.datasets import load_dataset
from flatmin.lab.data.embedded import load_digits
from flatmin.lab.data.torchvision_operators import torchvision
from flatmin.lab.errors import DataError
from flatmin.lab.spec.datasets import DATASETS
from flatmin.lab.spec.experiment import Data

pytestmark = pytest.mark.usefixtures("nothing_outside")


def fetch(images, examples, *, augment=False, epoch=0):
    return images.fetch(Draw(seed=0, epoch=epoch, examples=np.asarray(examples)), augment=augment)


def write_image(path, color, size=(40, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)


def test_the_digits_are_all_there_split_into_train_and_test():
    images, labels = load_digits()
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == np.uint8
    assert (images.min(), images.max()) == (0, 255)
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert images.mean() / 255 == pytest.approx(DATASETS["digits"].mean[0], abs=1e-4)
    assert images.std() / 255 == pytest.approx(DATASETS["digits"].std[0], abs=1e-4)
    # The first digit of the UCI file, a zero, in sixteenths.
    assert (np.round(images[0, 0] / 255 * 16))[0].astype(int).tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    dataset = load_dataset(Data(name="digits"))
    assert (len(dataset.train.labels), len(dataset.test.labels)) == (1297, 500)
    assert np.bincount(dataset.test.labels).min() > 30


def test_noise_touches_neither_validation_nor_test_labels():
    clean = load_dataset(Data(validation=0.1))
    noisy = load_dataset(Data(validation=0.1, label_noise=0.4))
    assert np.array_equal(clean.valid.labels, noisy.valid.labels)
    assert torch.equal(clean.valid.pixels, noisy.valid.pixels)
    assert np.array_equal(clean.test.labels, noisy.test.labels)
    assert torch.equal(clean.train.pixels, noisy.train.pixels)
    wrong = np.flatnonzero(clean.train.labels != noisy.train.labels)
    assert np.array_equal(wrong, noisy.flipped)
    assert len(wrong) == round(0.4 * len(clean.train.labels))


def test_the_validation_split_is_held_out_of_the_subset_too():
    whole = load_dataset(Data())
    divided = load_dataset(Data(validation=0.1, train_size=600))
    assert len(divided.train.labels) == 600
    assert len(divided.valid.labels) == 130
    rows = {tuple(p.flatten().tolist()) for p in divided.train.pixels}
    held_out = {tuple(p.flatten().tolist()) for p in divided.valid.pixels}
    assert not rows & held_out
    assert len(whole.train.labels) == 1297


def test_the_search_path_is_the_flag_the_environment_the_folder_and_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATMIN_DATA", "/from/environment")
    assert [str(p) for p in roots.search_path(tmp_path / "flag")] == [
        str(tmp_path / "flag"),
        "/from/environment",
        "data",
        str(tmp_path / "cache/flatmin/data"),
    ]


@pytest.mark.parametrize("name", [name for name, info in DATASETS.items() if info.marker])
def test_a_missing_dataset_says_which_files_to_put_where(name, tmp_path):
    with pytest.raises(DataError) as caught:
        load_dataset(Data(name=name), data_root=tmp_path / "mine")
    message = str(caught.value)
    assert f"{name} is in none of {tmp_path / 'mine'}, data, " in message
    assert DATASETS[name].files in message
    assert DATASETS[name].source in message
    assert f"into {tmp_path / 'mine'}" in message
    assert "--data-root or FLATMIN_DATA" in message
    if DATASETS[name].downloadable:
        assert "no network in tests" in message


@pytest.mark.parametrize("failure", [OSError("no network"), RuntimeError("a wrong checksum")])
def test_a_download_that_failed_leaves_nothing_and_is_tried_again(failure, tmp_path):
    def fails_half_way(target):
        (target / "flowers-102").mkdir()
        (target / "flowers-102" / "half.tgz").write_text("")
        raise failure

    def succeeds(target):
        (target / "flowers-102").mkdir()
        (target / "flowers-102" / "setid.mat").write_text("whole")

    for _ in range(2):
        with pytest.raises(DataError, match="Downloading it failed"):
            roots.find_or_download("flowers102", tmp_path, fails_half_way)
        assert not list(tmp_path.iterdir())
    (tmp_path / "flowers-102").mkdir()  # what an older version left: nothing at all
    assert roots.find("flowers102", tmp_path) is None
    assert roots.find_or_download("flowers102", tmp_path, succeeds) == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["flowers-102"]
    assert (tmp_path / "flowers-102" / "setid.mat").read_text() == "whole"
    assert roots.find("flowers102", tmp_path) == tmp_path


def write_cifar10(root, monkeypatch):
    """A CIFAR-10 of 20 + 4 images in the official format, with the checksums torchvision expects changed to match."""
    import pickle

    kind = torchvision.datasets.CIFAR10
    folder = root / kind.base_folder
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)

    def write(name, n):
        content = {"data": generator.integers(0, 256, (n, 3072), dtype=np.uint8), "labels": list(range(n))}
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, roots.file_md5(folder / name)]

    train = [write(f"data_batch_{i}", 4) for i in range(1, 6)]
    monkeypatch.setattr(kind, "train_list", train)
    monkeypatch.setattr(kind, "test_list", [write("test_batch", 4)])
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    meta = {"filename": "batches.meta", "key": "label_names", "md5": roots.file_md5(folder / "batches.meta")}
    monkeypatch.setattr(kind, "meta", meta)
    return folder


def test_cifar10_is_read_with_channels_first(tmp_path, monkeypatch):
    import pickle

    folder = write_cifar10(tmp_path / "data", monkeypatch)  # ./data is searched
    dataset = load_dataset(Data(name="cifar10"))
    assert dataset.train.pixels.shape == (20, 3, 32, 32)
    first = pickle.loads((folder / "data_batch_1").read_bytes())["data"][0]
    assert torch.equal(dataset.train.pixels[0], torch.from_numpy(first.reshape(3, 32, 32)))
    assert dataset.test.labels.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_a_damaged_cifar_file_is_named_and_never_unpickled(damage, tmp_path, monkeypatch):
    folder = write_cifar10(tmp_path / "data", monkeypatch)
    path = folder / "data_batch_3"
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[:-100] if damage == "truncated" else content[:2000] + b"x" + content[2001:])
    monkeypatch.setattr("pickle.load", lambda *a, **k: pytest.fail("unpickled before the checksum was compared"))
    with pytest.raises(DataError, match=r"data_batch_3 is (corrupt|missing).*Nothing was trained on it"):
        load_dataset(Data(name="cifar10"))


def write_idx(folder, monkeypatch, *, packed):
    contents = {
        "train-images-idx3-ubyte": (bytes([0, 0, 8, 3]), (6, 28, 28)),
        "train-labels-idx1-ubyte": (bytes([0, 0, 8, 1]), (6,)),
        "t10k-images-idx3-ubyte": (bytes([0, 0, 8, 3]), (4, 28, 28)),
        "t10k-labels-idx1-ubyte": (bytes([0, 0, 8, 1]), (4,)),
    }
    folder.mkdir(parents=True)
    import hashlib

    sums = {}
    for name, (magic, shape) in contents.items():
        body = (np.arange(np.prod(shape)) % 10).astype(np.uint8).tobytes()
        content = magic + b"".join(int(n).to_bytes(4, "big") for n in shape) + body
        sums[name] = hashlib.md5(content).hexdigest()
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    monkeypatch.setattr(datasets_module, "FASHION_MNIST_FILES", sums)


def test_an_archive_that_unpacks_to_much_more_is_corrupt_and_read_only_in_part(tmp_path, monkeypatch):
    folder = tmp_path / "root/fashion-mnist"
    folder.mkdir(parents=True)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(4 * gzip.compress(bytes(2**26), 1))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz is corrupt"):
        load_dataset(Data(name="fashion-mnist"), data_root=tmp_path / "root")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.5 * 2**26  # the bytes and a copy


def test_a_dataset_that_does_not_fit_into_memory_is_not_blamed_on_the_batch_size(monkeypatch):
    def too_large(*_):
        raise MemoryError("Unable to allocate 3 TiB")

    monkeypatch.setattr("flatmin.lab.data.datasets.load_digits", too_large)
    with pytest.raises(DataError, match="digits does not fit into memory, or one of its files is corrupt: Unable"):
        load_dataset(Data())


@pytest.mark.parametrize(("place", "packed"), [("FashionMNIST/raw", False), ("fashion-mnist", True), ("debian", True)])
def test_fashion_mnist_is_found_unpacked_packed_and_in_debians_folder(place, packed, tmp_path, monkeypatch):
    write_idx(tmp_path / "root" / place, monkeypatch, packed=packed)
    if place == "debian":
        monkeypatch.setattr(roots, "DEBIAN_FASHION_MNIST", tmp_path / "root/debian")
    dataset = load_dataset(Data(name="fashion-mnist"), data_root=tmp_path / "root")
    assert dataset.train.pixels.shape == (6, 1, 28, 28)
    assert dataset.train.pixels.flatten()[:12].tolist() == [*range(10), 0, 1]
    assert dataset.test.labels.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_a_damaged_fashion_mnist_file_is_named(damage, tmp_path, monkeypatch):
    folder = tmp_path / "root/fashion-mnist"
    write_idx(folder, monkeypatch, packed=True)
    path = folder / "t10k-images-idx3-ubyte.gz"
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        changed = gzip.compress(gzip.decompress(content)[:-1] + b"x")
        path.write_bytes(changed if damage == "changed" else content[: len(content) // 2])
    with pytest.raises(DataError, match="t10k-images-idx3-ubyte"):
        load_dataset(Data(name="fashion-mnist"), data_root=tmp_path / "root")


def test_svhn_joins_the_extra_images_and_moves_class_ten_to_zero(tmp_path, monkeypatch):
    kind = torchvision.datasets.SVHN
    splits = {}
    for split, n in (("train", 5), ("extra", 7), ("test", 3)):
        file = f"{split}_32x32.mat"
        pixels = np.full((32, 32, 3, n), len(splits), dtype=np.uint8)
        scipy.io.savemat(tmp_path / file, {"X": pixels, "y": np.arange(1, n + 1)[:, None] % 10 + 1})
        splits[split] = [f"http://x/{file}", file, roots.file_md5(tmp_path / file)]
    monkeypatch.setattr(kind, "split_list", splits)
    assert len(load_dataset(Data(name="svhn"), data_root=tmp_path).train.labels) == 5
    both = load_dataset(Data(name="svhn", extra=True), data_root=tmp_path)
    assert both.train.pixels.shape == (12, 3, 32, 32)
    assert both.train.labels.max() <= 9
    (tmp_path / "extra_32x32.mat").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"extra_32x32\.mat is corrupt"):
        load_dataset(Data(name="svhn", extra=True), data_root=tmp_path)


def write_flowers(root, monkeypatch):
    folder = root / "flowers-102"
    for i in range(1, 7):
        write_image(folder / f"jpg/image_{i:05d}.jpg", (40 * i, 0, 0))
    scipy.io.savemat(folder / "imagelabels.mat", {"labels": np.array([[3, 1, 2, 3, 1, 2]])})
    ids = {"trnid": np.array([[1, 2]]), "valid": np.array([[3, 4]]), "tstid": np.array([[5, 6]])}
    scipy.io.savemat(folder / "setid.mat", ids)
    kind = torchvision.datasets.Flowers102
    sums = {
        "image": kind._file_dict["image"],
        "label": ("imagelabels.mat", roots.file_md5(folder / "imagelabels.mat")),
        "setid": ("setid.mat", roots.file_md5(folder / "setid.mat")),
    }
    monkeypatch.setattr(kind, "_file_dict", sums)


def write_pets(root, monkeypatch):
    folder = root / "oxford-iiit-pet"
    for name in ("Cat_1", "Cat_2", "Dog_1"):
        write_image(folder / f"images/{name}.jpg", (9, 9, 9))
    (folder / "annotations").mkdir()
    (folder / "annotations/trainval.txt").write_text("Cat_1 1 1 1\nDog_1 2 2 1\n")
    (folder / "annotations/test.txt").write_text("Cat_2 1 1 1\n")


def write_aircraft(root, monkeypatch):
    folder = root / "fgvc-aircraft-2013b/data"
    for name in ("001", "002", "003"):
        write_image(folder / f"images/{name}.jpg", (9, 9, 9))
    (folder / "variants.txt").write_text("707-320\nA300B4\n")
    (folder / "images_variant_trainval.txt").write_text("001 A300B4\n002 707-320\n")
    (folder / "images_variant_test.txt").write_text("003 A300B4\n")


def write_cars(root, monkeypatch):
    folder = root / "stanford_cars"
    kinds = np.dtype([("fname", "O"), ("class", "O")])
    (folder / "devkit").mkdir(parents=True)
    for split, target in (
        ("train", "devkit/cars_train_annos.mat"),
        ("test", "cars_test_annos_withlabels.mat"),
    ):
        rows = np.array([("a.jpg", 2), ("b.jpg", 1)], dtype=kinds)
        scipy.io.savemat(folder / target, {"annotations": rows})
        for name in ("a", "b"):
            write_image(folder / f"cars_{split}/{name}.jpg", (9, 9, 9))
    names = np.array(["x", "y"], dtype=object)
    scipy.io.savemat(folder / "devkit/cars_meta.mat", {"class_names": names})


def write_food(root, monkeypatch):
    folder = root / "food-101"
    for name in ("pie/1", "pie/2", "soup/3"):
        write_image(folder / f"images/{name}.jpg", (9, 9, 9))
    (folder / "meta").mkdir()
    (folder / "meta/train.json").write_text(json.dumps({"pie": ["pie/1"], "soup": ["soup/3"]}))
    (folder / "meta/test.json").write_text(json.dumps({"pie": ["pie/2"], "soup": []}))


def write_imagenet(root, monkeypatch):
    folder = root / "imagenet"
    for split in ("train", "val"):
        for i, name in enumerate(("n01", "n02")):
            write_image(folder / split / name / f"{i}.JPEG", (9, 9, 9))
    torch.save(({"n01": ("tench",), "n02": ("shark",)}, ["n01"]), folder / "meta.bin")


PHOTOGRAPHS = [
    ("flowers102", write_flowers, [2, 0, 1, 2], [0, 1]),
    ("pets", write_pets, [0, 1], [0]),
    ("aircraft", write_aircraft, [1, 0], [1]),
    ("cars", write_cars, [1, 0], [1, 0]),
    ("food101", write_food, [0, 1], [0]),
    ("imagenet", write_imagenet, [0, 1], [0, 1]),
]


@pytest.mark.parametrize(("name", "write", "train", "test"), PHOTOGRAPHS, ids=[p[0] for p in PHOTOGRAPHS])
def test_photographs_are_read_in_torchvisions_layout(name, write, train, test, tmp_path, monkeypatch):
    write(tmp_path, monkeypatch)
    dataset = load_dataset(Data(name=name, image_size=16), data_root=tmp_path)
    assert dataset.train.labels.tolist() == train
    assert dataset.test.labels.tolist() == test
    assert fetch(dataset.train, [1, 0]).shape == (2, 3, 16, 16)
    assert fetch(dataset.train, [1, 0]).dtype == torch.uint8


def write_folders(root, classes=("jay", "wren"), per_class=3):
    for split in ("train", "test"):
        for c, name in enumerate(classes):
            for i in range(per_class):
                write_image(root / split / name / f"{i}.png", (100 * c, 20 * i, 7))


def test_class_folders_are_a_dataset(tmp_path):
    write_folders(tmp_path / "birds")
    dataset = load_dataset(Data(name=f"folder:{tmp_path / 'birds'}", image_size=8))
    assert dataset.info.num_classes == 2
    assert dataset.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    pixels = fetch(dataset.train, [4])[0]
    assert pixels.reshape(3, -1).T.unique(dim=0).tolist() == [[100, 20, 7]]


def png_bomb():
    """Return a PNG whose text chunk is small in the file and large in memory."""
    image = io.BytesIO()
    Image.new("RGB", (16, 16)).save(image, "PNG")
    data = image.getvalue()
    text = b"zTXt" + b"Comment\0\0" + zlib.compress(bytes(2_000_000))
    chunk = (len(text) - 4).to_bytes(4, "big") + text + zlib.crc32(text).to_bytes(4, "big")
    return data[:33] + chunk + data[33:]


IMAGES = {
    "empty.jpg": b"",
    "text.jpg": b"no image",
    "bomb.png": png_bomb(),
    "short.png": png_bomb()[:60],
    "bad.ppm": b"P6 x",
}


@pytest.mark.parametrize("name", IMAGES)
def test_a_damaged_image_is_named_when_its_turn_comes(name, tmp_path):
    write_folders(tmp_path)
    (tmp_path / "train/jay" / name).write_bytes(IMAGES[name])
    dataset = load_dataset(Data(name=f"folder:{tmp_path}", image_size=8))
    with pytest.raises(DataError, match=rf"train/jay/{name} cannot be read as an image.*Nothing was trained on it"):
        fetch(dataset.train, np.arange(4))


def test_a_listed_file_that_is_not_there_is_named_at_the_start(tmp_path, monkeypatch):
    write_flowers(tmp_path, monkeypatch)
    (tmp_path / "flowers-102/jpg/image_00006.jpg").unlink()
    with pytest.raises(DataError, match=r"image_00006\.jpg is missing"):
        load_dataset(Data(name="flowers102"), data_root=tmp_path)


def test_an_incomplete_dataset_names_what_it_needs(tmp_path, monkeypatch):
    write_food(tmp_path, monkeypatch)
    (tmp_path / "food-101/meta/train.json").unlink()
    with pytest.raises(DataError, match=r"food101 in .* is incomplete or corrupt.*food-101\.tar\.gz"):
        load_dataset(Data(name="food101"), data_root=tmp_path)


@pytest.mark.parametrize("problem", ["no test", "other classes"])
def test_bad_class_folders_are_explained(problem, tmp_path):
    write_folders(tmp_path)
    if problem == "no test":
        (tmp_path / "test").rename(tmp_path / "valid")
        match = "needs .*/train/CLASS/ and .*/test/CLASS/"
    else:
        (tmp_path / "test/jay").rename(tmp_path / "test/owl")
        match = r"same classes; only one of them has \['jay', 'owl'\]"
    with pytest.raises(DataError, match=match):
        load_dataset(Data(name=f"folder:{tmp_path}"))


def test_imagenets_augmentation_crops_at_random_and_evaluation_takes_the_middle(tmp_path):
    gradient = np.tile(np.arange(64, dtype=np.uint8)[None, :, None] * 4, (64, 1, 3))
    for split in ("train", "test"):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.fromarray(gradient).save(tmp_path / split / "a/0.png")
    dataset = load_dataset(Data(name=f"folder:{tmp_path}", augment="imagenet", image_size=16))
    crops = [fetch(dataset.train, [0], augment=True, epoch=epoch)[0, 0, 0] for epoch in range(40)]
    assert torch.equal(crops[3], fetch(dataset.train, [0], augment=True, epoch=3)[0, 0, 0])
    assert any(c[0] < c[-1] for c in crops)
    assert any(c[0] > c[-1] for c in crops)  # flipped
    middle = fetch(dataset.test, [0])[0, 0, 0].float()
    # The middle 56 of 64 pixels, to 16: the first output pixel is centered at 4 + 1.75.
    assert middle[0] == pytest.approx((4 + 1.75 - 0.5) * 4, abs=2)
    assert middle[-1] == pytest.approx((60 - 1.75 - 0.5) * 4, abs=2)


def test_crop_padding_evaluates_a_part_of_the_middle_that_depends_on_the_size_and_bicubic_resizes_so(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    for split in ("train", "test"):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.fromarray(noise).save(tmp_path / split / "a/0.png")
    data = Data(name=f"folder:{tmp_path}", augment="imagenet", image_size=16, crop_padding=32, resize="bicubic")
    dataset = load_dataset(data)
    middle = Image.fromarray(noise[20:40, 30:50])  # 16 / (16 + 32) of 60 is 20
    expected = np.asarray(middle.resize((16, 16), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    assert np.array_equal(fetch(dataset.test, [0])[0].numpy(), expected)
    bilinear = load_dataset(replace(data, resize="bilinear"))
    assert not np.array_equal(fetch(bilinear.test, [0])[0].numpy(), expected)
    crops = [fetch(d.train, [0], augment=True) for d in (dataset, bilinear)]
    assert not torch.equal(*crops)  # the random crops of training are resized alike


def test_torchvision_works_whether_or_not_its_operators_were_declared_here():
    """Where the compiled library loads, nothing is declared; else both names exist."""
    from flatmin.lab.data import torchvision_operators

    declared = torchvision_operators.declare_missing_operators()
    assert declared != torchvision_operators._compiled_library_loads()
    assert hasattr(torch.ops.torchvision, "nms")


def test_a_pipeline_of_files_yields_every_batch_in_order_and_evaluates_in_small_batches(tmp_path):
    from flatmin.lab.data.pipeline import Pipeline, epoch_batches

    write_folders(tmp_path, per_class=5)
    data = Data(name=f"folder:{tmp_path}", image_size=8, batch_size=4)
    dataset = load_dataset(data)
    info = dataset.info
    pipeline = Pipeline(data=data, info=info, mean=info.mean, std=info.std, seed=0, device=torch.device("cpu"))
    expected = epoch_batches(10, data, 0, 3)
    found = list(pipeline.training(dataset.train, epoch=3))
    assert [b.examples.tolist() for b in found] == [e.tolist() for e in expected]
    assert [b.number for b in pipeline.training(dataset.train, epoch=3, start=1)] == [1, 2]
    tested = list(pipeline.evaluation(dataset.test))
    assert [len(b.examples) for b in tested] == [4, 4, 2]
    assert np.concatenate([b.labels.numpy() for b in tested]).tolist() == [0] * 5 + [1] * 5


def test_decoding_threads_are_divided_among_the_workers_of_a_host(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert datasets_module._decoding_threads() == 12
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert datasets_module._decoding_threads() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert datasets_module._decoding_threads() == 1
