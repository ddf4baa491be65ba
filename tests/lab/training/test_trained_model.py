"""A trained model, read back to be measured."""

import numpy as np
from PIL import Image

from flatmin.lab.data.images import FileImages
from flatmin.lab.spec.experiment import Data, Experiment, Model
from flatmin.lab.training.engine import train
from flatmin.lab.training.trained_model import load_trained


def test_few_examples_are_read_alone(tmp_path, monkeypatch):
    generator = np.random.default_rng(0)
    for split in ("train", "test"):
        for label in ("a", "b"):
            folder = tmp_path / "images" / split / label
            folder.mkdir(parents=True)
            for number in range(6):
                pixels = generator.integers(0, 256, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    experiment = Experiment(
        data=Data(name=f"folder:{tmp_path}/images", image_size=32, batch_size=4),
        model=Model(name="wrn-10-1"),
        epochs=1,
        precision="float32",
    )
    trained = load_trained(train(experiment, runs=tmp_path / "runs").directory)
    decode, read = FileImages._decode, []

    def recorded(self, *arguments, **keywords):
        read.append(arguments)
        return decode(self, *arguments, **keywords)

    everything = trained.training_batches()
    monkeypatch.setattr(FileImages, "_decode", recorded)
    batches = trained.training_batches(5, batch_size=3)
    assert len(read) == 5
    assert [len(labels) for _, labels in batches] == [3, 1, 1]  # the pipeline's batches of 4, in parts of 3 at most
    inputs = [image for part, _ in everything for image in part]
    found = [image for part, _ in batches for image in part]
    assert all((image == known).all() for image, known in zip(found, inputs[:5], strict=True))
    assert len(trained.test_batches(100)[0][1]) == 4
    assert trained.predicted_labels().shape == (12,)
