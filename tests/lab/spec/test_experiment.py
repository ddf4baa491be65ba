"""Specs: what is allowed, the JSON round trip, the hash that names a run."""

import dataclasses
import math

import pytest

from flatmin.lab.errors import SpecError
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim


def an_experiment():
    return Experiment(
        name="example",
        data=Data(name="cifar10", augment="cutout", validation=0.1, train_size=500),
        model=Model(name="wrn-28-10"),
        optim=Optim(rho=0.05, p=math.inf, m=32, clip_norm=5.0),
        epochs=200,
    )


def test_the_json_round_trip_gives_an_equal_spec_back_with_infinity_too():
    experiment = an_experiment()
    text = experiment.to_json()
    assert Experiment.from_json(text) == experiment
    assert "Infinity" not in text  # not JSON


def test_fields_left_out_of_the_json_have_their_defaults():
    assert Experiment.from_json('{"optim": {"rho": 0.1}}') == Experiment(optim=Optim(rho=0.1))


def test_specs_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        an_experiment().epochs = 3
    with pytest.raises(TypeError):
        Data("cifar10")


def test_the_hash_is_the_same_on_every_machine_and_with_every_future_field():
    """The hash of a spec is part of the names of finished runs: it may never change."""
    assert Experiment().run_hash() == "522ee6092c"
    assert an_experiment().run_hash() == "71b268f536"


def test_the_hash_ignores_the_name_and_sees_every_other_field():
    experiment = an_experiment()
    assert dataclasses.replace(experiment, name="other").run_hash() == experiment.run_hash()
    changed = [
        dataclasses.replace(experiment, epochs=201),
        dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, label_noise=0.4)),
        dataclasses.replace(experiment, model=Model(name="wrn-16-2")),
        dataclasses.replace(experiment, optim=dataclasses.replace(experiment.optim, rho=0.1)),
    ]
    assert len({e.run_hash() for e in (experiment, *changed)}) == 5


def test_whole_numbers_and_floats_of_the_same_value_are_one_run():
    assert Experiment(optim=Optim(lr=1)).run_hash() == Experiment(optim=Optim(lr=1.0)).run_hash()


def test_the_runs_name_says_what_it_is_and_has_no_slash():
    name = Experiment(model=Model(name="timm/tf_efficientnet_l2"), optim=Optim(rho=0.05)).run_name(3)
    assert name.startswith("digits-timm_tf_efficientnet_l2-sam0.05-")
    assert name.endswith("-seed3")
    assert "/" not in name


def test_radius_may_be_a_factor_of_the_suggested_one_and_has_one_name():
    """1x is auto; the hashes of specs with a number are those of before."""
    specs = {rho: Experiment(optim=Optim(rho=rho)) for rho in ("auto", "0.5x", "0.50x", "1x", "1.0x", "2.5e-1x", 0.5)}
    assert specs["1x"] == specs["1.0x"] == specs["auto"]
    assert specs["0.5x"].run_hash() == specs["0.50x"].run_hash() != specs[0.5].run_hash()
    assert [specs[rho].optim.rho_factor for rho in ("auto", "0.5x", "2.5e-1x", 0.5)] == [1.0, 0.5, 0.25, None]
    assert [specs[rho].optim.rho_number for rho in ("auto", "0.5x", 0.5)] == [1.0, 0.5, 0.5]
    assert specs["2.5e-1x"].run_name(0).startswith("digits-wrn-16-2-sam0.25x-")
    assert specs[0.5].run_hash() == "03f5b53c5b"
    assert Experiment.from_json(specs["0.5x"].to_json()) == specs["0.5x"]


BAD = [
    (lambda: Optim(rho="0.5"), "optim.rho", "'0.5'", "auto, or a positive factor of it such as 0.5x"),
    (lambda: Optim(rho="half"), "optim.rho", "'half'", "such as 0.5x"),
    (lambda: Optim(rho="0x"), "optim.rho", "'0x'", "positive factor"),
    (lambda: Optim(rho="infx"), "optim.rho", "'infx'", "positive factor"),
    (lambda: Optim(rho="nanx"), "optim.rho", "'nanx'", "positive factor"),
    (lambda: Optim(rho="auto", direction="momentum"), "optim.rho", "'auto'", "a number where direction is momentum"),
    (lambda: Data(name="cifar-10"), "data.name", "'cifar-10'", "Did you mean 'cifar10'?"),
    (lambda: Data(name="folder:"), "data.name", "'folder:'", "folder:PATH"),
    (lambda: Data(augment="mirror"), "data.augment", "'mirror'", "none, flip, basic, cutout, autoaugment, imagenet"),
    (lambda: Data(label_noise=1.5), "data.label_noise", "1.5", "[0, 1]"),
    (lambda: Data(validation=1.0), "data.validation", "1.0", "[0, 1)"),
    (lambda: Data(mixup=-1), "data.mixup", "-1", "at least 0"),
    (lambda: Data(batch_size=0), "data.batch_size", "0", "at least 1"),
    (lambda: Data(batch_size=2.5), "data.batch_size", "2.5", "of type int"),
    (lambda: Data(batch_size=True), "data.batch_size", "True", "of type int"),  # which Python takes for 1
    (lambda: Optim(lr=True), "optim.lr", "True", "of type float"),
    (lambda: Data(cutout_size=0), "data.cutout_size", "0", "at least 1"),
    (lambda: Data(image_size=4), "data.image_size", "4", "at least 8"),
    (lambda: Data(train_size=0), "data.train_size", "0", "at least 1"),
    (lambda: Data(name="flowers102", crop_padding=-1), "data.crop_padding", "-1", "at least 0"),
    (lambda: Data(name="cifar10", crop_padding=32), "data.crop_padding", "32", "only for photographs"),
    (lambda: Data(resize="nearest"), "data.resize", "'nearest'", "bilinear, bicubic"),
    (lambda: Data(extra=True), "data.extra", "True", "svhn"),
    (lambda: Data(seed=-1), "data.seed", "-1", "at least 0"),
    (lambda: Model(name="wrn-17-2"), "model.name", "'wrn-17-2'", "6 n + 4"),
    (lambda: Model(name="pyramidnet-270-200"), "model.name", "'pyramidnet-270-200'", "9 n + 2"),
    (lambda: Model(name="shake-shake-25-2x96d"), "model.name", "shake-shake-25", "6 n + 2"),
    (lambda: Model(name="vgg"), "model.name", "'vgg'", "flatmin list"),
    (lambda: Model(name="resnet-20", norm="none"), "model.norm", "'none'", "only wrn"),
    (lambda: Model(name="resnet-20", design="reference"), "model.design", "'reference'", "only wrn-*"),
    (lambda: Model(norm="none", design="reference"), "model.design", "'reference'", "with batch norm"),
    (lambda: Model(name="resnet-20", dropout=0.5), "model.dropout", "0.5", "only wrn-* and models from timm"),
    (lambda: Model(name="efficientnet-b7", drop_connect=1.0), "model.drop_connect", "1.0", "[0, 1)"),
    (lambda: Model(head="keep"), "model.head", "'keep'", "no checkpoint"),
    (lambda: Model(freeze_batch_norm=True), "model.freeze_batch_norm", "True", "no checkpoint"),
    (lambda: Optim(lr=0), "optim.lr", "0.0", "positive"),
    (lambda: Optim(lr=math.nan), "optim.lr", "nan", "a number"),
    (lambda: Optim(momentum=1), "optim.momentum", "1.0", "[0, 1)"),
    (lambda: Optim(momentum=0), "optim.nesterov", "True", "momentum is 0"),
    (lambda: Optim(weight_decay=-1), "optim.weight_decay", "-1", "at least 0"),
    (lambda: Optim(label_smoothing=1), "optim.label_smoothing", "1.0", "[0, 1)"),
    (lambda: Optim(clip_norm=0), "optim.clip_norm", "0.0", "positive"),
    (lambda: Optim(rho=-0.1), "optim.rho", "-0.1", "0.01 to 0.5"),
    (lambda: Optim(p=0.5), "optim.p", "0.5", "[1, inf]"),
    (lambda: Optim(rho=0.1, ascent_steps=0), "optim.ascent_steps", "0", "at least 1"),
    (lambda: Optim(rho=0.1, p=3, ascent_steps=2), "optim.ascent_steps", "2", "p is not 1, 2 or inf"),
    (lambda: Optim(m=0), "optim.m", "0", "at least 1"),
    (lambda: Optim(rho=0.1, m=8, sync_perturbation=True), "optim.m", "8", "sync_perturbation"),
    (lambda: Optim(second_order=True), "optim.second_order", "True", "rho is 0"),
    (lambda: Optim(rho=0.1, m=8, second_order=True), "optim.second_order", "True", "m, sync"),
    (lambda: Optim(rho=0.1, adaptive=0.1, second_order=True), "optim.second_order", "True", "adaptive"),
    (lambda: Optim(perturb="norm"), "optim.perturb", "'norm'", "rho is 0"),
    (lambda: Optim(rho=0.1, perturb="bias"), "optim.perturb", "'bias'", "all, norm"),
    (lambda: Optim(rho=0.1, perturb="norm", second_order=True), "optim.second_order", "True", "perturb"),
    (lambda: Optim(direction="random"), "optim.direction", "'random'", "rho is 0"),
    (lambda: Optim(ascent_steps=3), "optim.ascent_steps", "3", "rho is 0"),
    (lambda: Data(name="cifar10", augment="imagenet"), "data.augment", "'imagenet'", "small images"),
    (lambda: Experiment(epochs=0), "epochs", "0", "0 with a model.checkpoint"),
    (lambda: Experiment(epochs=3, optim=Optim(warmup_epochs=3)), "optim.warmup_epochs", "3.0", "epochs"),
    (lambda: Experiment(optim=Optim(rho=0.1, m=129)), "optim.m", "129", "128"),
    (lambda: Experiment(precision="float16"), "precision", "'float16'", "auto, float32, bfloat16"),
]


@pytest.mark.parametrize(("build", "field", "value", "allowed"), BAD, ids=[f"{b[1]}-{b[2]}" for b in BAD])
def test_an_error_names_the_field_the_value_and_what_is_allowed(build, field, value, allowed):
    with pytest.raises(SpecError) as caught:
        build()
    message = str(caught.value)
    assert message.startswith(field)
    assert value in message
    assert allowed in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a spec in JSON"),
        ("[]", "must be a JSON object"),
        ('{"epoch": 3}', "epoch is an unknown field. Did you mean 'epochs'?"),
        ('{"optim": {"rh": 3}}', "optim.rh is an unknown field. Did you mean 'rho'?"),
        ('{"epochs": "3"}', "epochs must be of type int; got '3'"),
    ],
)
def test_bad_json_is_explained(text, message):
    with pytest.raises(SpecError, match=None) as caught:
        Experiment.from_json(text)
    assert message in str(caught.value)
