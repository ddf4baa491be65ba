"""The recipes of docs/recipes.md train with SAM, and what it and docs/tutorial.md say of other libraries holds."""

import copy
import re
import runpy
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from flatmin import SAM
from references import closure_of
from test_examples import by_hand, cross_entropy

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.filterwarnings(r"ignore:.*(LeafSpec|torch\.jit|pin_memory).*")


def example(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def sam_step(opt, model, x, y):
    return opt.step(closure_of(opt, lambda: nn.functional.cross_entropy(model(x), y)))


def make_data():
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    return x, x[:, :3].argmax(dim=1)


def test_tutorial():
    """The page says that SAM has a lower test error, sharpness and curvature."""
    result = example("tutorial")["main"]()
    assert result["SAM test error"] < result["SGD test error"] / 2
    assert result["SAM sharpness"] < result["SGD sharpness"]
    assert result["SAM eigenvalue"] < result["SGD eigenvalue"] / 2


def blocks(heading, language="python", page="recipes"):
    """Return the code blocks of a section of a page."""
    (section,) = re.findall(rf"^##? {heading}$(.*?)(?=^## |\Z)", (ROOT / f"docs/{page}.md").read_text(), re.M | re.S)
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.M | re.S)


def run_recipe(heading, index=0, page="recipes", **names):
    names = {"SAM": SAM, "torch": torch, "nn": nn, "partial": partial} | names
    exec(blocks(heading, page=page)[index], names)
    return SimpleNamespace(**names)


def make_dropout_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


def assert_same(model, reference):
    for (name, p), q in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, msg=name)


def train_by_hand(steps, rho=0.05, clip=None, scale=1.0, make_base=torch.optim.SGD, lr=0.1, **settings):
    """Take steps on lists of batches, with the sum of their scaled losses; noise begins at seed 1."""
    reference = make_dropout_model()
    base = make_base(reference.parameters(), lr=lr, **settings)
    torch.manual_seed(1)
    for batches in steps:
        by_hand(reference, base, batches, lambda m, b: cross_entropy(m, b, scale), rho=rho, clip=clip)
    return reference


def test_skorch():
    skorch = example("skorch_net")
    net = skorch["main"](num_epochs=2)
    model = skorch["make_model"]()
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=0.1, model=model)
    x, y = skorch["make_data"]()
    for _ in range(2):
        losses = [sam_step(opt, model, x[i : i + 32], y[i : i + 32]).item() for i in range(0, 96, 32)]
    assert_same(net.module_, model)
    assert net.history[-1, "train_loss"] == pytest.approx(np.mean(losses), rel=1e-5)  # at w
    net.set_params(rho=0.2)
    assert net.optimizer_.rho == 0.2
    net.set_params(rho=0.3).partial_fit(x, y)
    assert net.optimizer_.metrics.perturbation_norm == pytest.approx(0.3)


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


def test_timm_diff_leads_to_the_example():
    lines = (EXAMPLES / "timm_loop.py").read_text().splitlines()
    hunks = blocks("timm", "diff")
    assert len(hunks) == 3
    for hunk in hunks:
        after = [line[1:] for line in hunk.splitlines()]
        assert any(lines[i : i + len(after)] == after for i in range(len(lines))), hunk


def test_accelerate_accumulation():
    """8 batches in steps of 3: the last has 2, divided by 3 as Accelerate does."""
    from accelerate import Accelerator

    x, y = make_data()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    sam = SAM(torch.optim.SGD((inner := make_dropout_model()).parameters(), lr=0.1), rho=0.05)
    model, opt, loader = accelerator.prepare(inner, sam, data)
    sam.model = model
    torch.manual_seed(1)
    loss_fn = nn.functional.cross_entropy
    run_recipe("Accelerate", 1, accelerator=accelerator, model=model, opt=opt, sam=sam, loader=loader, loss_fn=loss_fn)
    micro_batches = list(zip(x.split(4), y.split(4), strict=True))

    def steps():
        iter(data)  # which draws a seed
        yield from (micro_batches[i : i + 3] for i in (0, 3, 6))

    assert_same(inner, train_by_hand(steps(), scale=1 / 3))


def test_fastai():
    """A learner with the events of fastai's, in their order."""

    class Callback:
        def __getattr__(self, name):
            return getattr(self.learn, name)

    class Learner:
        def __init__(self, dls, model, loss_func, opt_func, cbs):
            self.dls, self.model, self.loss_func, self.opt_func, self.cbs = dls, model, loss_func, opt_func, cbs
            self.training = True
            for callback in cbs:
                callback.learn = self

        def fit(self, lr):
            self.opt = self.opt_func(self.model.parameters(), lr=lr)
            for x, y in self.dls:
                torch.rand(1)  # an augmentation
                self.xb, self.yb = (x,), (y,)
                self.cbs[0].before_batch()
                self.loss_func(self.model(x), y).backward()
                self.cbs[0].before_step()
                self.opt.step()
                self.opt.zero_grad()

    def wrapper(params, opt, **settings):
        built = opt(params, **settings)
        return SimpleNamespace(opt=built, zero_grad=built.zero_grad, step=built.step)

    model, batch = make_dropout_model(), make_data()
    names = {"Callback": Callback, "Learner": Learner, "OptimWrapper": wrapper, "model": model, "dls": [batch, batch]}
    learner = run_recipe("fastai", loss_fn=nn.functional.cross_entropy, **names).learner
    torch.manual_seed(1)
    learner.fit(lr=0.1)

    def steps():
        for _ in range(2):
            torch.rand(1)
            yield [batch]

    assert_same(model, train_by_hand(steps(), momentum=0.9))


def test_mmengine():
    """A model and an optimizer wrapper with the methods of MMEngine's."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_dropout_model()

        def data_preprocessor(self, data, training):
            return {"x": data[0], "y": data[1]}

        def _run_forward(self, data, mode):
            return {"loss_cls": nn.functional.cross_entropy(self.net(data["x"]), data["y"])}

        def parse_losses(self, losses):
            return sum(losses.values()), losses

    class OptimWrapper:
        def __init__(self, optimizer):
            self.optimizer, self.zero_grad = optimizer, optimizer.zero_grad

        def optim_context(self, model):
            return nullcontext()

        def backward(self, loss):
            loss.backward()

        def step(self):
            nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], 0.1)
            self.optimizer.step()

    registry = SimpleNamespace(register_module=lambda: lambda function: function)
    recipe = run_recipe("MMEngine", Model=Model, OPTIMIZERS=registry)
    model, batch = recipe.SAMModel(), make_data()
    wrapper = OptimWrapper(recipe.SAMSGD(model.parameters(), lr=0.1))
    torch.manual_seed(1)
    for _ in range(2):
        model.train_step(batch, wrapper)
    assert_same(model.net, train_by_hand([[batch], [batch]], clip=0.1))


def test_ultralytics():
    """A trainer with the loop of Ultralytics': accumulation, a scaler, and zeroing after the step."""

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_dropout_model()

        def forward(self, batch):
            loss = nn.functional.cross_entropy(self.net(batch["img"]), batch["cls"])
            return loss[None], {"cls": loss.detach()}

    class DetectionTrainer:
        device, amp = torch.device("cpu"), False

        def __init__(self, overrides):
            self.model, self.scaler = Detector(), torch.amp.GradScaler("cpu", init_scale=1024.0)
            self.optimizer = self.build_optimizer(self.model, lr=0.1)
            detectors.append(self.model)
            torch.manual_seed(1)

        def build_optimizer(self, model, lr):
            return torch.optim.SGD(model.parameters(), lr=lr)

        def preprocess_batch(self, batch):
            return {"img": batch["img"] * 2, "cls": batch["cls"]}

        def train(self):
            for i, batch in enumerate(batches):
                batch = self.preprocess_batch(batch)
                loss, _ = self.model(batch)
                self.scaler.scale(loss.sum()).backward()
                if i in (1, 4):
                    self.optimizer_step()

        def optimizer_step(self):
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=0.5)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()

    x, y = make_data()
    batches = [{"img": a, "cls": b} for a, b in zip(x.split(6), y.split(6), strict=True)][:5]
    detectors = []
    run_recipe("Ultralytics", DetectionTrainer=DetectionTrainer)
    steps = [[(2 * b["img"], b["cls"]) for b in group] for group in (batches[:2], batches[2:])]
    assert_same(detectors[0].net, train_by_hand(steps, clip=0.5))


def test_cleanrl():
    x, y = make_data()
    minibatches = list(zip(x.split(8), y.split(8), strict=True))
    agent = make_dropout_model()
    torch.manual_seed(1)

    def ppo_loss(agent, minibatch):
        return nn.functional.cross_entropy(agent(minibatch[0]), minibatch[1])

    names = {"agent": agent, "minibatches": minibatches, "ppo_loss": ppo_loss, "max_grad_norm": 0.5}
    run_recipe("CleanRL and stable-baselines3", **names)
    adam = {"make_base": torch.optim.Adam, "lr": 2.5e-4, "eps": 1e-5}
    assert_same(agent, train_by_hand([[batch] for batch in minibatches], rho=0.01, clip=0.5, **adam))


def test_diffusion():
    x, _ = make_data()

    class Denoiser(nn.Linear):
        def forward(self, x, t):
            return super().forward(x)

    def add_noise(x, noise, t):
        return x + t[:, None] * noise / 10

    def backward(model, x):
        t = torch.randint(0, 10, (len(x),))
        noise = torch.randn_like(x)
        nn.functional.mse_loss(model(add_noise(x, noise, t), t), noise).backward()

    model = Denoiser(6, 6)
    reference = copy.deepcopy(model)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05, model=model)
    ema = torch.optim.swa_utils.AveragedModel(model)
    torch.manual_seed(1)
    run_recipe("Diffusion", model=model, opt=opt, ema=ema, x=x, num_steps=10, add_noise=add_noise)
    torch.manual_seed(1)
    by_hand(reference, torch.optim.SGD(reference.parameters(), lr=0.1), [x], backward, rho=0.05)
    assert_same(model, reference)
    assert_same(ema.module, reference)


def test_cheap_sam_in_two_passes_is_that_of_step_batch():
    """Each loss of docs/cost.md is weighted by its share of the batch, as step_batch does by itself."""
    torch.manual_seed(0)
    x, y = make_data()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    reference = copy.deepcopy(model)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.1, weight=8, model=model)
    page = {"opt": opt, "x": x.double(), "y": y, "loss_of": lambda x, y: nn.functional.cross_entropy(model(x), y)}
    run_recipe("Which one to use", page="cost", **page)
    same = SAM(torch.optim.SGD(reference.parameters(), lr=0.1), rho=0.1, model=reference)
    same.step_batch(lambda x, y: nn.functional.cross_entropy(reference(x), y), (x.double(), y), part=1 / 8)
    torch.testing.assert_close(list(model.parameters()), list(reference.parameters()), rtol=0, atol=1e-14)


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

    opt.step(closure_of(opt, lambda: nn.functional.softplus(discriminator(generator(x).detach())).mean()))
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
