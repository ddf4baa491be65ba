"""The data and models of the study that are not images with a ResNet."""

import numpy as np
import pytest
import torch

from flatmin.lab.data.datasets import load_dataset
from flatmin.lab.data.embedded import CHARACTERS, load_python_text
from flatmin.lab.data.pipeline import Pipeline
from flatmin.lab.models.build import build_model
from flatmin.lab.spec.experiment import Data, Experiment, Model, SpecError


def test_a_text_is_64_characters_and_its_class_the_next_one():
    windows, following = load_python_text(train=True)
    text = ["".join(CHARACTERS[code] for code in window.flatten()) for window in windows[:400]]
    # Windows overlap: the class of one is a character of a later one, at the place where it begins.
    start = next(n for n in range(1, 65) if text[1].startswith(text[0][n:]))
    assert text[1][64 - start] == CHARACTERS[following[0]]
    assert windows.shape == (20_000, 1, 8, 8)


def test_no_text_of_the_test_set_is_in_the_training_set():
    train, test = (load_python_text(train=t)[0].reshape(-1, 64) for t in (True, False))
    train_text = {bytes(window[i : i + 40]) for window in train for i in range(25)}
    leaked = sum(any(bytes(window[i : i + 40]) in train_text for i in range(25)) for window in test)
    assert leaked < 0.03 * len(test)  # rules of dashes, and sentences that the reference repeats


def test_codes_reach_the_model_exactly():
    data = Data(name="python-text", train_size=50)
    dataset = load_dataset(data)
    pipeline = Pipeline(data=data, info=dataset.info, mean=dataset.info.mean, std=dataset.info.std, seed=0,
                        device=torch.device("cpu"))  # fmt: skip
    (batch,) = pipeline.training(dataset.train, epoch=0)
    codes = dataset.train.pixels[torch.from_numpy(batch.examples)]
    torch.testing.assert_close(batch.inputs, codes.float(), rtol=0, atol=1e-4)


def test_the_transformer_sees_order_and_the_last_character():
    torch.manual_seed(0)
    model = build_model(Model(name="char-transformer-2-32"), num_classes=96, in_channels=1)
    x = torch.randint(0, 96, (4, 1, 8, 8)).float()
    y = x.clone()
    y[:, 0, 0, 0] = (y[:, 0, 0, 0] + 1) % 96
    assert model(x).shape == (4, 96)
    assert not torch.allclose(model(x), model(y))
    assert not torch.allclose(model(x), model(x.flip(-1)))
    torch.testing.assert_close(model(x + 0.3), model(x))  # codes are rounded


def test_the_perceptron_has_the_named_layers():
    model = build_model(Model(name="mlp-2-16"), num_classes=3, in_channels=1)
    assert [p.shape for p in model.parameters()] == [(16, 64), (16,), (16, 16), (16,), (3, 16), (3,)]
    x = torch.rand(5, 1, 8, 8)
    first, second = model.layers
    expected = model.head(torch.relu(second(torch.relu(first(x.flatten(1))))))
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ({"name": "python-text"}, "wrn-10-1", "char-transformer-* with python-text"),
        ({"name": "digits"}, "char-transformer-2-64", "char-transformer-* with python-text"),
        ({"name": "python-text", "augment": "basic"}, "char-transformer-2-64", "not images"),
        ({"name": "digits"}, "mlp-0-16", "mlp-DEPTH-WIDTH"),
        ({"name": "python-text"}, "char-transformer-2-48", "multiple of 32"),
    ],
)
def test_what_does_not_go_together_is_refused(data, model, message):
    with pytest.raises(SpecError) as error:
        Experiment(data=Data(**data), model=Model(name=model))
    assert message in str(error.value)


def test_labels_are_balanced_enough_to_learn_from():
    labels = load_python_text(train=False)[1]
    assert np.bincount(labels, minlength=96).max() < 0.3 * len(labels)
