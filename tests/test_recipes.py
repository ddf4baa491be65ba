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
