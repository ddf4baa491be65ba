"""Bootstrapped training: the second network sees what the first one predicts (Section 3.3). And models read back."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from flatmin.lab.data.datasets import load_dataset
from flatmin.lab.data.images import FileImages
from flatmin.lab.models.build import build_model
from flatmin.lab.runs.checkpoint import latest_checkpoint
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.training.engine import train
from flatmin.lab.training.trained_model import TrainedModel, load_trained


def noisy(**changes):
    data = Data(train_size=120, label_noise=0.4, batch_size=40, bootstrap=True)
    spec = Experiment(data=data, model=Model(name="cnn-4"), optim=Optim(lr=0.05), epochs=3, precision="float32")
    return replace(spec, **changes)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    second = train(noisy(), seed=3, runs=runs)
    return second, runs / noisy().first_stage().run_name(3)


def test_the_second_network_is_trained_on_what_the_first_one_predicts(both):
    second, first = both
    trained = load_trained(first)
    images = trained.dataset.train
    inputs = torch.cat([b.inputs for b in trained.pipeline.evaluation(images)])
    expected = torch.stack([trained.network(x[None])[0].argmax() for x in inputs]).numpy()  # one by one: slow, obvious
    kept = json.loads((second.directory / "predicted_labels.json").read_text())
    assert kept["labels"] == expected.tolist()
    assert kept["num_changed"] == int((images.labels != expected).sum()) > 0
    np.testing.assert_array_equal(load_trained(second.directory).dataset.train.labels, expected)


def test_the_first_stage_is_the_run_without_bootstrap(both, tmp_path):
    _, first = both
    alone = train(noisy().first_stage(), seed=3, runs=tmp_path)
    assert (first / "metrics.jsonl").read_bytes() == (alone.directory / "metrics.jsonl").read_bytes()


def test_the_second_network_starts_from_other_weights(tmp_path):
    spec = noisy(epochs=1, keep_every=1)
    second = train(spec, runs=tmp_path)
    starts = [load_trained(tmp_path / e.run_name(0), epoch=0).network.conv1.weight for e in (spec, spec.first_stage())]
    assert not torch.equal(*starts)
    assert second.experiment.data.bootstrap


def test_predictions_are_kept_for_a_run_that_is_resumed(tmp_path, monkeypatch):
    predicted = (load_dataset(noisy().data).train.labels + (np.arange(120) < 30)) % 10
    monkeypatch.setattr(TrainedModel, "predicted_labels", lambda _: predicted)
    run = train(noisy(epochs=1), runs=tmp_path)
    assert json.loads((run.directory / "predicted_labels.json").read_text())["num_changed"] == 30
    monkeypatch.setattr(TrainedModel, "predicted_labels", lambda _: pytest.fail("predicted again"))
    shutil.rmtree(run.directory / "checkpoints")
    (run.directory / "result.json").unlink()
    assert train(noisy(epochs=1), runs=tmp_path).history == run.history
    np.testing.assert_array_equal(load_trained(run.directory).dataset.train.labels, predicted)


def test_validation_and_test_labels_stay_clean(tmp_path):
    data = replace(noisy().data, validation=0.2)
    run = train(noisy(data=data, epochs=1), runs=tmp_path)
    clean = load_dataset(replace(data, label_noise=0.0, bootstrap=False))
    dataset = load_trained(run.directory).dataset
    np.testing.assert_array_equal(dataset.valid.labels, clean.valid.labels)
    np.testing.assert_array_equal(dataset.test.labels, clean.test.labels)


def test_weights_along_training_are_kept_and_lead_to_the_last_ones(tmp_path):
    spec = noisy(data=Data(train_size=80, batch_size=40), epochs=4, keep_every=2)
    run = train(spec, seed=1, runs=tmp_path)
    assert [p.name[:12] for p in sorted((run.directory / "weights").iterdir())] == [f"epoch-{k:06d}" for k in (0, 2, 4)]
    last = latest_checkpoint(run.directory / "checkpoints")["model"]
    for name, value in load_trained(run.directory, epoch=4).network.state_dict().items():
        assert torch.equal(value, last[name])
    assert not torch.equal(load_trained(run.directory, epoch=2).network.conv1.weight, last["conv1.weight"])
    fresh = build_model(spec.model, num_classes=10, in_channels=1).conv1.weight
    assert load_trained(run.directory, epoch=0).network.conv1.weight.shape == fresh.shape


def test_a_run_stops_at_the_training_loss_it_was_asked_for_and_is_evaluated_there(tmp_path):
    long = Experiment(
        data=Data(train_size=80, batch_size=20), model=Model(name="cnn-4"), optim=Optim(lr=0.05), epochs=12,
        precision="float32", evaluate_every=100,
    )  # fmt: skip
    losses = [line["train_loss"] for line in train(long, runs=tmp_path).history]
    limit = losses[5] + 1e-9
    expected = next(i for i, loss in enumerate(losses) if loss <= limit) + 1
    stopped = train(replace(long, stop_loss=limit), runs=tmp_path)
    assert len(stopped.history) == expected < 12
    assert [line["train_loss"] for line in stopped.history] == losses[:expected]
    assert stopped.metrics["test_error"] is not None
    assert train(replace(long, stop_loss=limit), runs=tmp_path).history == stopped.history


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

    everything = trained.batches(trained.dataset.train)
    monkeypatch.setattr(FileImages, "_decode", recorded)
    batches = trained.batches(trained.dataset.train, 5, batch_size=3)
    assert len(read) == 5
    assert [len(labels) for _, labels in batches] == [3, 1, 1]  # the pipeline's batches of 4, in parts of 3 at most
    inputs = [image for part, _ in everything for image in part]
    found = [image for part, _ in batches for image in part]
    assert all((image == known).all() for image, known in zip(found, inputs[:5], strict=True))
    assert len(trained.batches(trained.dataset.test, 100)[0][1]) == 4
    assert trained.predicted_labels().shape == (12,)
