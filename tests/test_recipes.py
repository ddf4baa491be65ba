"""What docs/recipes.md and docs/tutorial.md claim of other libraries holds."""

import copy
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import flatmin.lab.data.torchvision_operators  # noqa: F401  (timm and peft import torchvision)
from flatmin import SAM

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.filterwarnings(r"ignore:.*(LeafSpec|torch\.jit|pin_memory).*")


def example(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def sam_step(opt, model, x, y):
    def closure():
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return opt.step(closure)


def make_data():
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    return x, x[:, :3].argmax(dim=1)


def test_tutorial():
    """The page says that SAM has a lower test error, sharpness and curvature."""
    result = example("tutorial")["main"]()
    assert result["SAM test error"] < result["SGD test error"] / 2
    assert result["SAM sharpness"] < result["SGD sharpness"]
    assert result["SAM eigenvalue"] < result["SGD eigenvalue"] / 2


def test_skorch():
    skorch = example("skorch_net")
    net = skorch["main"](num_epochs=2)
    model = skorch["make_model"]()
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=0.1, model=model)
    x, y = skorch["make_data"]()
    for _ in range(2):
        for i in range(0, 96, 32):
            sam_step(opt, model, x[i : i + 32], y[i : i + 32])
    for p, q in zip(net.module_.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # timm leaves files to the garbage collector
def test_timm(tmp_path):
    from PIL import Image

    rng = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (tmp_path / name).mkdir()
        for i in range(8):
            Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(tmp_path / name / f"{i}.png")
    train = example("timm_loop")["train"]
    model, opt = train(str(tmp_path), num_epochs=1)
    assert opt.metrics.perturbation_norm == pytest.approx(0.05)
    plain, _ = train(str(tmp_path), num_epochs=1, rho=0.0)
    # The same noise, batches and running statistics up to the first step; other weights after it.
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert {int(m.num_batches_tracked) for m in model.modules() if isinstance(m, nn.BatchNorm2d)} == {2}


def test_lora_perturbs_the_adapters_alone():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), LoraConfig(target_modules=["0"]))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora" in name for name in trained)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(generator=torch.Generator().manual_seed(2))  # at its start of 0 there is nothing to see
    opt = SAM(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3), rho=0.1, model=model)
    x, y = make_data()
    before = copy.deepcopy(model.state_dict())
    opt.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    with opt.perturbed():
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        nn.functional.cross_entropy(model(x), y).backward()
    opt.step()
    assert moved == trained
    assert {name for name, p in model.named_parameters() if not torch.equal(p, before[name])} == trained


@pytest.mark.parametrize("average", ["ema", "swa"])
def test_averages_are_of_w(average):
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5) if average == "ema" else None)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5, model=model)
    seen = []
    for _ in range(3):
        sam_step(opt, model, *make_data())
        averaged.update_parameters(model)
        seen.append(model[0].weight.detach().clone())
    expected = seen[0] / 4 + seen[1] / 4 + seen[2] / 2 if average == "ema" else sum(seen) / 3
    torch.testing.assert_close(averaged.module[0].weight, expected)


def test_weight_norm_perturbs_what_is_trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)))
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5, model=model)
    x, y = make_data()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    nn.functional.cross_entropy(model(x), y).backward()
    with opt.perturbed():
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        nn.functional.cross_entropy(model(x), y).backward()
    assert {name.rpartition(".")[2] for name in moved} >= {"original0", "original1"}
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_spectral_norm_takes_one_power_iteration_per_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)))
    other = copy.deepcopy(model)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.0), rho=0.5, model=model)
    x, y = make_data()
    sam_step(opt, model, x, y)
    other(x)  # one forward pass at w
    buffers = dict(other.named_buffers())
    assert buffers
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_a_scheduler_that_holds_sam_sees_steps_on_batches():
    model = nn.Linear(6, 3)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1))
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    opt.step_batch(lambda x, y: nn.functional.cross_entropy(model(x), y), make_data(), part=0.5)
    schedule.step()  # without a warning that no step was taken
    assert opt.param_groups[0]["lr"] == 0.05


def make_normalized_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


@pytest.mark.parametrize("form", ["closure", "two passes"])
def test_fabric_trains_like_a_plain_loop(form):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    sam = SAM(torch.optim.SGD((inner := make_normalized_model()).parameters(), lr=0.1, momentum=0.9), rho=0.3)
    model, opt = fabric.setup(inner, sam)
    sam.model = model
    plain = make_normalized_model()
    plain_opt = SAM(torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), rho=0.3, model=plain)
    x, y = make_data()

    def closure():
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        return loss

    for step in range(2):
        torch.manual_seed(step)
        if form == "closure":
            opt.step(closure)
        else:
            closure()
            with sam.perturbed():
                closure()
            opt.step()
        torch.manual_seed(step)
        sam_step(plain_opt, plain, x, y)
    for p, q in zip(inner.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("both", [True, False])
def test_buffers_of_both_models_of_a_gan_come_from_the_first_pass(both):
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    discriminator = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    models = nn.ModuleList([generator, discriminator])
    once = copy.deepcopy(models)
    opt = SAM(torch.optim.Adam(discriminator.parameters()), rho=0.5, model=models if both else discriminator)
    x, _ = make_data()

    def closure():
        opt.zero_grad()
        loss = nn.functional.softplus(discriminator(generator(x).detach())).mean()
        loss.backward()
        return loss

    opt.step(closure)
    once[1](once[0](x))  # one forward pass at w
    same = [torch.equal(b, c) for b, c in zip(models.buffers(), once.buffers(), strict=True)]
    assert all(same) == both
    assert all(torch.equal(p, q) for p, q in zip(generator.parameters(), once[0].parameters(), strict=True))


def test_one_sam_over_two_models_has_one_joint_norm():
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(6, 4), nn.Linear(4, 3)
    models = nn.ModuleList([encoder, decoder])
    opt = SAM(torch.optim.Adam([*encoder.parameters(), *decoder.parameters()]), rho=0.5, model=models)
    before = copy.deepcopy(models)
    x, y = make_data()
    nn.functional.cross_entropy(decoder(encoder(x)), y).backward()
    with opt.perturbed():
        moved = [(p - q).detach().norm() for p, q in zip(models.parameters(), before.parameters(), strict=True)]
        nn.functional.cross_entropy(decoder(encoder(x)), y).backward()
    assert min(moved) > 0
    assert torch.stack(moved).norm() == pytest.approx(0.5)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_dynamo_rejects_a_whole_step_as_one_graph():
    model = nn.Linear(6, 3)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model)

    @torch.compile(backend="eager", fullgraph=True)
    def step(x, y):
        return sam_step(opt, model, x, y)

    before = model.weight.detach().clone()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        step(*make_data())
    assert torch.equal(model.weight, before)
    sam_step(opt, model, *make_data())  # the error leaves nothing behind
    assert not torch.equal(model.weight, before)
