"""The recipes of docs/recipes.md in the libraries themselves, where they are installed.

The group ``dev`` has lightly, PyTorch Geometric and stable-baselines3. ``make test-recipes`` installs the others, TRL,
fastai, MMEngine and Ultralytics, and runs this file. tests/test_recipes.py runs the recipes in loops of the same shape.
"""

import copy
import inspect
import re
import textwrap
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from flatmin import SAM
from flatmin.integrations.transformers import SAMPLING
from test_examples import by_hand, cross_entropy
from test_recipes import blocks, make_data, make_dropout_model, run_recipe

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


def require(name):
    return pytest.importorskip(name, reason=f"{name} is not installed")


def assert_close(model, reference, tolerance=1e-12):
    for (name, p), q in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(p.double(), q.double(), rtol=0, atol=tolerance, msg=name)


def make_tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *"abcdefghij"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_language_model(seed=0):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    size = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 12}
    return GPT2LMHeadModel(GPT2Config(**size, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)).double()


def make_text_data(datasets, columns):
    rng = np.random.default_rng(0)
    return datasets.Dataset.from_list(
        [
            {name: " " + " ".join(rng.choice(list("abcdefghij"), rng.integers(2, 7))) for name in columns}
            for _ in range(16)
        ]
    )


def record_steps(trainer):
    """Keep the micro-batches of every step, with their number of items."""
    steps, step = [], trainer.training_step

    def recording(model, inputs, num_items_in_batch=None):
        if not trainer._micro_batches:
            steps.append([])
        steps[-1].append((copy.deepcopy(dict(inputs)), num_items_in_batch))
        return step(model, inputs, num_items_in_batch)

    trainer.training_step = recording
    return steps


def test_trl(tmp_path):
    """Weights are as with SAM by hand on TRL's own loss; TRL's metrics of the first step are as in plain training."""
    trl, datasets = require("trl"), require("datasets")
    make_language_model().save_pretrained(tmp_path)

    def load():
        return type(make_language_model()).from_pretrained(tmp_path, dtype=torch.float64)

    def make_args(kind):
        settings = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
        settings |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 0.1}
        settings |= {"optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "logging_steps": 1}
        settings |= {"num_train_epochs": 1, "gradient_checkpointing": False}
        return getattr(trl, f"{kind}Config")(output_dir=str(tmp_path / "out"), **settings)

    tokenizer, text = make_tokenizer(), make_text_data(datasets, ["text"])
    pairs = make_text_data(datasets, ["prompt", "chosen", "rejected"])
    recipe = run_recipe("TRL: SFT and DPO", model=load(), args=make_args("DPO"), pairs=pairs, tokenizer=tokenizer)
    settings = {"train_dataset": text, "processing_class": tokenizer}
    sft = recipe.SAMSFTTrainer(load(), args=make_args("SFT"), sam={"rho": 0.01}, **settings)
    plain_sft = trl.SFTTrainer(load(), args=make_args("SFT"), **settings)
    settings["train_dataset"] = pairs
    plain_dpo = trl.DPOTrainer(load(), args=make_args("DPO"), **settings)
    for trainer, plain in ((sft, plain_sft), (recipe.trainer, plain_dpo)):
        steps = record_steps(trainer)
        trainer.train()
        assert [len(step) for step in steps] == [2, 2]
        plain.train()
        reference, backward = plain.model, plain.training_step
        reference.load_state_dict(load().state_dict())
        plain.current_gradient_accumulation_steps = 2
        base = torch.optim.SGD(reference.parameters(), lr=0.1)
        for step in steps:
            by_hand(reference, base, step, lambda m, b: backward(m, copy.deepcopy(b[0]), b[1]), rho=0.01)
        assert_close(trainer.model, reference)
        first, expected = trainer.state.log_history[0], plain.state.log_history[0]
        ours = {"sharpness", "sam_grad_norm", "grad_norm"}
        assert set(first) - ours == set(expected) - ours
        for name in set(expected) - ours:
            assert first[name] == pytest.approx(expected[name]), name
        assert trainer.state.log_history[1]["num_tokens"] == plain.state.log_history[1]["num_tokens"]


def test_trl_trainers_that_sample_completions_are_refused():
    """Every trainer of TRL that generates text within ``_prepare_inputs`` or ``training_step`` is on the list."""
    trl = require("trl")
    folder = Path(trl.__file__).parent
    files = [*folder.glob("trainer/*_trainer.py"), *folder.glob("experimental/*/*_trainer.py")]
    found = set()
    for source in (file.read_text() for file in files):
        if re.search(r"def _generate|\.generate\(|rollout", source):
            found |= set(re.findall(r"^class (\w+Trainer)\(_BaseTrainer\)", source, re.M))
    assert {"GRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer"} <= found
    assert found - {"CPOTrainer", "ORPOTrainer"} <= SAMPLING  # which generate only for their evaluation


def make_model(dropout=0.0, dtype=torch.float64):
    model = make_dropout_model().to(dtype)
    model[2].p = dropout
    return model


def make_batches():
    x, y = make_data()
    return list(zip(x.double().split(8), y.split(8), strict=True))


def train_by_hand(batches, clip=None, **settings):
    model = make_model()
    base = torch.optim.SGD(model.parameters(), lr=0.1, **settings)
    for batch in batches:
        by_hand(model, base, [batch], cross_entropy, rho=0.05, clip=clip)
    return model


def zero_radius(base, rho, **settings):
    """Take the place of SAM in a recipe, whose second pass then repeats the first one."""
    return SAM(base, rho=0.0, **settings)


def test_fastai():
    require("fastai")
    from fastai.callback.core import Callback
    from fastai.callback.training import GradientClip
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    data = torch.utils.data.TensorDataset(*make_data())
    dls = DataLoaders.from_dsets(data, data, bs=8, shuffle=False, num_workers=0, device="cpu")

    def fit(dropout, **names):
        torch.manual_seed(1)
        names |= {"Callback": Callback, "Learner": Learner, "OptimWrapper": OptimWrapper, "dls": dls}
        names["model"] = make_model(dropout, torch.float32)
        learner = run_recipe("fastai", loss_fn=nn.functional.cross_entropy, **names).learner
        fit_quietly(learner)
        return learner.model

    def fit_quietly(learner):
        with learner.no_bar(), learner.no_logging():
            learner.fit(1, lr=0.1, wd=0.0, cbs=[GradientClip(0.1)])

    assert_close(fit(dropout=0.0), train_by_hand(make_batches(), clip=0.1, momentum=0.9), 1e-6)
    # Both passes draw the same noise: at radius 0 this is fastai's own training.
    torch.manual_seed(1)
    base = partial(OptimWrapper, opt=partial(torch.optim.SGD, momentum=0.9))
    plain = Learner(dls, make_model(0.3, torch.float32), nn.functional.cross_entropy, opt_func=base)
    fit_quietly(plain)
    assert_close(fit(dropout=0.3, SAM=zero_radius), plain.model, 0.0)


def test_mmengine(tmp_path):
    require("mmengine")
    from mmengine.model import BaseModel
    from mmengine.registry import OPTIMIZERS
    from mmengine.runner import Runner

    class Model(BaseModel):
        def __init__(self):
            super().__init__()
            self.net = make_model()

        def forward(self, x, y, mode):
            return {"loss_cls": nn.functional.cross_entropy(self.net(x), y)}

    model = run_recipe("MMEngine", Model=Model, OPTIMIZERS=OPTIMIZERS).SAMModel()
    data = torch.utils.data.TensorDataset(*(torch.cat(column) for column in zip(*make_batches(), strict=True)))
    optimizer = {"type": "SAMSGD", "lr": 0.1, "momentum": 0.9}
    runner = Runner(
        model,
        str(tmp_path),
        train_dataloader=torch.utils.data.DataLoader(data, batch_size=8),
        train_cfg={"by_epoch": True, "max_epochs": 1},
        optim_wrapper={"type": "OptimWrapper", "optimizer": optimizer, "clip_grad": {"max_norm": 0.1}},
        log_level="ERROR",
    )
    runner.train()
    assert_close(model.net, train_by_hand(make_batches(), clip=0.1, momentum=0.9))


def test_ultralytics(tmp_path, monkeypatch):
    """The first gradient is SAM's by hand; at radius 0 the training is the trainer's own."""
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    require("ultralytics")
    from PIL import Image
    from ultralytics.models.yolo.detect import DetectionTrainer

    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for i in range(6):
        for folder in ("images", "labels"):
            (tmp_path / folder).mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(tmp_path / f"images/{i}.png")
        (tmp_path / f"labels/{i}.txt").write_text("0 0.5 0.5 0.4 0.4\n1 0.3 0.3 0.2 0.2\n")
    (tmp_path / "coco8.yaml").write_text(f"path: {tmp_path}\ntrain: images\nval: images\nnames: [cat, dog]\n")

    class SmallTrainer(DetectionTrainer):
        """Two epochs of three batches without noise; its validation needs torchvision's operators."""

        def __init__(self, overrides):
            settings = {"epochs": 2, "batch": 2, "nbs": 4, "imgsz": 64, "device": "cpu", "workers": 0, "plots": False}
            settings |= {"warmup_epochs": 0, "optimizer": "SGD", "lr0": 0.01, "project": str(tmp_path / "runs")}
            super().__init__(overrides=overrides | settings)
            self.kept, self.gradients = [], None
            trainers.append(self)

        def validate(self):
            return {}, 0.0

        def final_eval(self):
            pass

        def preprocess_batch(self, batch):
            batch = super().preprocess_batch(batch)
            self.kept.append(batch)
            return batch

        def optimizer_step(self):
            if not self.gradients:
                ours = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
                self.gradients = ours, *gradients_by_hand(copy.deepcopy(self.model), self.kept)
            super().optimizer_step()

    def gradients_by_hand(model, batches):
        parameters = [p for p in model.parameters() if p.requires_grad]

        def gradient():
            return torch.autograd.grad(sum(model(batch)[0].sum() for batch in batches), parameters)

        g = gradient()
        norm = torch.cat([t.double().flatten() for t in g]).norm()
        with torch.no_grad():
            for p, t in zip(parameters, g, strict=True):
                p.add_(0.05 * t / norm)
        return gradient(), g

    trainers = []
    run_recipe("Ultralytics", DetectionTrainer=SmallTrainer)
    ours, expected, plain = (torch.cat([t.flatten() for t in grads]) for grads in trainers[0].gradients)
    assert (ours - expected).norm() < 1e-3 * expected.norm()
    assert (plain - expected).norm() > 1e-2 * expected.norm()
    run_recipe("Ultralytics", DetectionTrainer=SmallTrainer, SAM=zero_radius)
    SmallTrainer({"model": "yolo11n.yaml", "data": "coco8.yaml"}).train()
    _, zero, plain = (trainer.model for trainer in trainers)
    assert_close(zero, plain, 0.0)
    assert len(trainers[0].batches) == 0


def test_lightly_queue_and_teacher():
    """Both passes see the queue and the teacher of the last step, and each is updated once, at w."""
    require("lightly")
    from lightly.loss import NTXentLoss
    from lightly.models.utils import update_momentum

    def make_models():
        torch.manual_seed(0)
        return nn.Linear(6, 128), nn.Linear(6, 128)

    x_1, _ = make_data()
    x_2 = x_1 + 0.1
    student, teacher = make_models()
    names = {"x_1": x_1, "x_2": x_2, "student": student, "teacher": teacher, "update_momentum": update_momentum}
    torch.manual_seed(1)
    recipe = run_recipe("Self-supervised learning: a queue or a teacher", NTXentLoss=NTXentLoss, **names)

    reference, ema = make_models()
    torch.manual_seed(1)
    criterion = NTXentLoss(memory_bank_size=(4096, 128))
    update_momentum(reference, ema, m=0.99)
    start = copy.deepcopy(criterion)

    def gradient(criterion):
        return torch.autograd.grad(criterion(reference(x_1), ema(x_2).detach()), list(reference.parameters()))

    g = gradient(criterion)
    norm = torch.cat([t.flatten() for t in g]).norm()
    before = copy.deepcopy(reference)
    with torch.no_grad():
        for p, t in zip(reference.parameters(), g, strict=True):
            p.add_(0.05 * t / norm)
    g = gradient(start)
    with torch.no_grad():
        for p, q, t in zip(reference.parameters(), before.parameters(), g, strict=True):
            p.copy_(q - 0.1 * t)
    for ours, expected in ((student, reference), (teacher, ema), (recipe.criterion, criterion)):
        assert_close(ours, expected, 1e-6)
    assert torch.equal(recipe.criterion.memory_bank.bank, criterion.memory_bank.bank)  # not in the state dict
    assert int(recipe.criterion.memory_bank.bank_ptr) == 32


def test_graphs_with_negative_sampling():
    """At a tiny radius both passes have the same loss: PyTorch Geometric draws negatives with Python's ``random``."""
    require("torch_geometric")
    from torch_geometric.nn import GCNConv
    from torch_geometric.utils import negative_sampling

    features, _ = make_data()
    edges = torch.stack([torch.arange(31), torch.arange(1, 32)])
    torch.manual_seed(0)
    encoder = GCNConv(6, 4)

    def link_loss(z, edges, negatives):
        scores = [(z[e[0]] * z[e[1]]).sum(dim=1) for e in (edges, negatives)]
        return nn.functional.softplus(-scores[0]).mean() + nn.functional.softplus(scores[1]).mean()

    names = {"encoder": encoder, "features": features, "edges": edges, "negative_sampling": negative_sampling}
    for rho, limit in ((1e-6, 1e-5), (0.5, 10)):
        opt = SAM(torch.optim.SGD(encoder.parameters(), lr=0.0), rho=rho)
        run_recipe("Graphs with negative sampling", opt=opt, link_loss=link_loss, **names)
        assert abs(opt.metrics.sharpness) < limit
    assert opt.metrics.sharpness > 0.01


def test_stable_baselines3(tmp_path):
    """PPO's ``train`` with the two lines of the recipe takes the steps of SAM by hand, and its file can be loaded."""
    require("stable_baselines3")
    import gymnasium
    from stable_baselines3 import PPO
    from stable_baselines3.ppo import ppo

    heading = "CleanRL and stable-baselines3"
    recipe = run_recipe(heading, 1, PPO=PPO, Discrete=gymnasium.spaces.Discrete)
    (hunk,) = blocks(heading, "diff")
    before, after = (
        "".join(line[1:] + "\n" for line in hunk.splitlines() if line[0] in signs) for signs in (" ", " +")
    )
    source = inspect.getsource(PPO.train)
    assert source.count(before) == 1
    names = {}
    exec(textwrap.dedent(source.replace(before, after)), vars(ppo), names)
    recipe.SAMPPO.train = names["train"]

    def make(kind):
        settings = {"n_steps": 32, "batch_size": 16, "n_epochs": 2, "learning_rate": 0.1, "seed": 0, "device": "cpu"}
        policy = {"net_arch": [8], "optimizer_class": torch.optim.SGD, "optimizer_kwargs": {"momentum": 0.9}}
        return kind("MlpPolicy", "CartPole-v1", policy_kwargs=policy, **settings)

    algorithm, reference = make(recipe.SAMPPO), make(recipe.SAMPPO)
    batches, get = [], algorithm.rollout_buffer.get
    algorithm.rollout_buffer.get = lambda size: [batches.append(batch) or batch for batch in get(size)]
    algorithm.learn(32)
    assert len(batches) == 4
    for batch in batches:
        base = reference.policy.optimizer.base
        by_hand(reference.policy, base, [batch], lambda _, b: reference.loss(b, 0.2).backward(), rho=0.01, clip=0.5)
    assert_close(algorithm.policy, reference.policy, 1e-6)

    del algorithm.rollout_buffer.get
    algorithm.save(tmp_path / "ppo.zip")
    loaded = recipe.SAMPPO.load(tmp_path / "ppo.zip", env=algorithm.env)
    assert isinstance(loaded.policy.optimizer, SAM)
    for name, value in algorithm.policy.optimizer.state_dict()["state"].items():
        assert torch.equal(
            loaded.policy.optimizer.state_dict()["state"][name]["momentum_buffer"], value["momentum_buffer"]
        )
    loaded.learn(32)

    # The loss of the recipe is PPO's own: at radius 0 both train alike.
    zero = make(recipe.SAMPPO)
    zero.policy.optimizer.rho = 0.0
    zero.learn(96)
    assert_close(zero.policy, make(PPO).learn(96).policy, 1e-5)
