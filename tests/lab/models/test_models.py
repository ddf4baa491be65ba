"""The networks: their sizes, their random layers, their start, their checkpoints."""

import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from flatmin.lab.data.embedded import load_digits
from flatmin.lab.errors import ModelError, SpecError
from flatmin.lab.models.build import build_model, head_name, input_statistics, set_training_mode
from flatmin.lab.models.pyramidnet import block_widths, survival_probabilities
from flatmin.lab.models.resnets import BasicBlock
from flatmin.lab.models.shake import RandomScale, ShakeDrop, ShakeShake, ShakeShortcut, true_gradient
from flatmin.lab.models.small import Block, positions
from flatmin.lab.spec.experiment import Model


def num_parameters(name, num_classes=10):
    with torch.device("meta"):
        network = build_model(Model(name=name), num_classes=num_classes)
    return sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(
    ("name", "num_classes", "count"),
    [
        ("wrn-28-10", 10, 36_479_194),
        ("resnet-20", 10, 269_722),
        ("resnet-20-projection", 10, 272_474),
        ("resnet-32", 10, 464_154),
        ("resnet-56", 10, 853_018),
        ("resnet-56-noshort", 10, 853_018),
        ("resnet-110", 10, 1_727_962),
        ("shake-shake-26-2x96d", 10, 26_192_922),
        ("pyramidnet-272-200", 10, 26_210_842),
        ("pyramidnet-272-200-shakedrop", 10, 26_210_842),
        ("resnet-50", 1000, 25_557_032),
        ("resnet-101", 1000, 44_549_160),
        ("resnet-152", 1000, 60_192_808),
        ("efficientnet-b7", 1000, 66_347_960),
        ("efficientnet-l2", 1000, 480_309_308),
    ],
)
def test_the_number_of_parameters_is_the_published_one(name, num_classes, count):
    assert num_parameters(name, num_classes) == count


def test_a_block_of_the_vision_transformer_is_that_of_torch():
    torch.manual_seed(0)
    block = Block(64).double()
    theirs = nn.TransformerEncoderLayer(
        64, 2, 256, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, dtype=torch.float64
    )
    ours = [block.query_key_value, block.projection, block.mlp[0], block.mlp[2], block.norm1, block.norm2]
    with torch.no_grad():
        for mine, other in zip((p for layer in ours for p in layer.parameters()), theirs.parameters(), strict=True):
            other.copy_(mine.normal_(std=0.3))
    x = torch.randn(3, 5, 64, dtype=torch.float64)
    torch.testing.assert_close(block(x), theirs.train()(x))


def test_the_vision_transformer_sees_where_a_patch_is():
    torch.manual_seed(0)
    network = build_model(Model(name="vit-2-32-2"), num_classes=10, in_channels=1).double()
    image = torch.zeros(1, 1, 4, 6, dtype=torch.float64)
    logits = []
    for row, column in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]:
        moved = image.clone()
        moved[0, 0, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = 1
        logits.append(network(moved))
    distances = torch.pdist(torch.cat(logits))
    assert distances.min() > 1e-3  # without positions all are 0
    assert positions(2, 3, 32).shape == (6, 32)
    torch.testing.assert_close(
        positions(2, 3, 8)[4],
        torch.tensor([1.0, 1e-4] * 4)
        .sin()
        .index_copy(0, torch.tensor([2, 3, 6, 7]), torch.tensor([1.0, 1e-4, 1.0, 1e-4]).cos()),
    )


def test_the_vision_transformer_has_second_derivatives_and_rejects_images_it_cannot_cut():
    network = build_model(Model(name="vit-1-32-2"), num_classes=3, in_channels=1)
    loss = F.cross_entropy(network(torch.randn(2, 1, 4, 4)), torch.tensor([0, 2]))
    parameters = list(network.parameters())
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    again = torch.autograd.grad(sum(g.square().sum() for g in gradients), parameters)
    assert all(g.isfinite().all() for g in again)
    with pytest.raises(ModelError, match="2 x 2 pixels do not divide images of 4 x 5"):
        network(torch.randn(2, 1, 4, 5))
    with pytest.raises(SpecError, match="WIDTH a multiple of 32"):
        Model(name="vit-2-48-2")


def reference_model(name, num_classes=10, in_channels=3):
    return build_model(Model(name=name, design="reference"), num_classes=num_classes, in_channels=in_channels)


def test_dropout_of_a_wide_resnet_is_before_its_last_layer_and_only_in_training():
    torch.manual_seed(0)
    network = build_model(Model(name="wrn-10-1", dropout=0.5), num_classes=10, in_channels=1)
    torch.manual_seed(0)
    without = build_model(Model(name="wrn-10-1"), num_classes=10, in_channels=1)
    assert all(torch.equal(value, without.state_dict()[name]) for name, value in network.state_dict().items())
    images, seen = torch.randn(4, 1, 8, 8), []
    network.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    assert torch.equal(network.eval()(images), without.eval()(images))
    network.train()(images)
    whole, dropped = seen
    assert (whole == 0).float().mean() < 0.25
    assert 0.4 < (dropped == 0).float().mean() < 0.75


def test_the_reference_wide_resnet_has_no_weights_in_its_shortcuts():
    """Its parameters are the published ones without the three 1x1 convolutions: 16 x 160, 160 x 320, 320 x 640."""
    with torch.device("meta"):
        count = sum(p.numel() for p in reference_model("wrn-28-10").parameters())
    assert count == 36_479_194 - (16 * 160 + 160 * 320 + 320 * 640)


def by_hand(network, x):
    """The reference's forward pass, written out: only the first block's shortcut starts behind norm and ReLU."""
    x = network.conv1(x)
    for number, block in enumerate(network.blocks):
        activated = F.relu(block.norm1(x))
        start = activated if number == 0 else x
        out = block.conv2(F.relu(block.norm2(block.conv1(activated))))
        factor = start.shape[-1] // out.shape[-1]
        n, c, h, w = start.shape
        pooled = start.reshape(n, c, h // factor, factor, w // factor, factor).mean((3, 5))
        padded = torch.zeros_like(out)
        padded[:, :c] = pooled
        x = out + padded
    return network.head(F.relu(network.norm(x)).mean((2, 3)))


def test_the_reference_wide_resnet_is_the_one_written_out_by_hand():
    torch.manual_seed(0)
    network = reference_model("wrn-16-2").double().eval()
    x = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(network(x), by_hand(network, x))
    standard = build_model(Model(name="wrn-16-2"), num_classes=10).double().eval()
    missing, unknown = standard.load_state_dict(network.state_dict(), strict=False)
    assert not unknown
    assert {key.partition("shortcut")[1] for key in missing} == {"shortcut"}


@pytest.mark.parametrize("name", ["wrn-10-2", "shake-shake-8-2x4d", "pyramidnet-11-6", "pyramidnet-11-6-shakedrop"])
@pytest.mark.parametrize("num_classes", [10, 100])
def test_the_last_layer_of_the_reference_is_uniform_with_the_number_of_classes(name, num_classes):
    torch.manual_seed(0)
    head = reference_model(name, num_classes).head
    bound = num_classes**-0.5
    assert head.weight.abs().max() <= bound
    assert head.weight.abs().max() > 0.9 * bound
    assert head.weight.var().item() == pytest.approx(bound**2 / 3, rel=0.15)
    assert not head.bias.any()


@pytest.mark.parametrize("stride", [1, 2])
def test_the_reference_shortcut_of_shake_shake_has_no_relu_and_always_shifts(stride):
    shortcut = ShakeShortcut(1, 2, stride, reference=True).eval()
    nn.init.ones_(shortcut.conv1.weight)
    nn.init.ones_(shortcut.conv2.weight)
    x = torch.randn(1, 1, 8, 8)
    out = shortcut(x) * math.sqrt(1 + shortcut.norm.eps)
    torch.testing.assert_close(out[:, :1], x[:, :, ::stride, ::stride])
    torch.testing.assert_close(out[:, 1:], F.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:][:, :, ::stride, ::stride])


def test_dropout_and_drop_connect_of_efficientnet_are_the_reference_codes():
    """Dropout 0.5 before the last layer; block i of n is dropped with probability 0.2 i / n."""
    from timm.layers import DropPath

    with torch.device("meta"):
        network = build_model(Model(name="efficientnet-b7", dropout=0.5, drop_connect=0.2), num_classes=10)
        plain = build_model(Model(name="efficientnet-b7"), num_classes=10)
    blocks = [block for stage in network.blocks for block in stage]
    rates = [block.drop_path.drop_prob if isinstance(block.drop_path, DropPath) else 0.0 for block in blocks]
    assert len(blocks) == 55
    assert rates == pytest.approx([0.2 * i / 55 for i in range(55)])
    assert (network.drop_rate, plain.drop_rate) == (0.5, 0.0)
    assert not any(isinstance(m, DropPath) and m.drop_prob for m in plain.modules())


def test_the_wide_resnet_without_batch_norm_has_biases_and_scalars_instead():
    """Per block: two biases and a scalar in place of two norms; the first convolution has a bias."""
    with torch.device("meta"):
        network = build_model(Model(name="wrn-16-2", norm="none"), num_classes=10)
    blocks = sum(2 * c * 2 + 2 for c in (32, 64, 128))
    with_norm = num_parameters("wrn-16-2")
    norms = 2 * 16 + 2 * 32 * 3 + 2 * 32 + 2 * 64 * 3 + 2 * 64 + 2 * 128 * 3 + 2 * 128
    assert sum(p.numel() for p in network.parameters()) == with_norm - norms + blocks + 16
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.modules())


FAMILIES = (
    *("wrn-10-1", "resnet-20", "resnet-20-projection", "resnet-56-noshort", "shake-shake-8-2x4d"),
    *("pyramidnet-11-6", "pyramidnet-11-6-shakedrop", "cnn-4", "timm/resnet10t"),
)
OF_REFERENCE = ("wrn-10-1", "shake-shake-8-2x2d", "pyramidnet-11-6")


@pytest.mark.parametrize(
    ("name", "design"), [*((name, "standard") for name in FAMILIES), *((name, "reference") for name in OF_REFERENCE)]
)
@pytest.mark.parametrize(("channels", "size"), [(1, 28), (3, 32)])
def test_every_family_makes_logits_of_grey_and_color_images_and_gets_gradients_everywhere(name, design, channels, size):
    torch.manual_seed(0)
    network = build_model(Model(name=name, design=design), num_classes=7, in_channels=channels)
    logits = network(torch.randn(4, channels, size, size))
    assert logits.shape == (4, 7)
    F.cross_entropy(logits, torch.arange(4)).backward()
    assert all(p.grad is not None for p in network.parameters())


def test_a_wide_resnet_without_batch_norm_starts_as_its_shortcuts_and_trains():
    """SkipInit: every residual branch starts at 0. Deep and without norm, it must still fit a batch."""
    torch.manual_seed(0)
    network = build_model(Model(name="wrn-40-1", norm="none"), num_classes=10, in_channels=1)
    assert all(b.residual_scale.item() == 0 for b in network.blocks)
    images, labels = load_digits()
    x, y = torch.from_numpy(images[:32]).float() / 128 - 1, torch.from_numpy(labels[:32])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] < 4
    assert losses[-1] < 0.5 * losses[0]
    assert all(b.residual_scale.item() != 0 for b in network.blocks)


def test_noshort_really_has_no_shortcut():
    """With zero weights in the branch, a block with a shortcut passes its input on; without, nothing."""
    x = torch.rand(2, 16, 4, 4)
    for kind, expected in (("identity", x), ("none", torch.zeros_like(x))):
        block = BasicBlock(16, 16, 1, kind).eval()
        nn.init.zeros_(block.conv2.weight)
        assert torch.equal(block(x), expected)


def test_the_identity_shortcut_takes_every_other_pixel_and_fills_with_zero_channels():
    x = torch.rand(2, 16, 4, 4)
    block = BasicBlock(16, 32, 2, "identity").eval()
    nn.init.zeros_(block.conv2.weight)
    out = block(x)
    assert torch.equal(out[:, :16], x[:, :, ::2, ::2])
    assert torch.equal(out[:, 16:], torch.zeros(2, 16, 2, 2))


@pytest.mark.parametrize("size", [7, 8])
def test_shake_shakes_shortcut_sees_every_second_pixel_and_its_diagonal_neighbor(size):
    shortcut = ShakeShortcut(1, 2, 2).eval()
    nn.init.ones_(shortcut.conv1.weight)
    nn.init.ones_(shortcut.conv2.weight)
    x = torch.rand(1, 1, size, size)
    out = shortcut(x) * math.sqrt(1 + shortcut.norm.eps)
    torch.testing.assert_close(out[:, :1], x[:, :, ::2, ::2])
    odd = F.pad(x, (0, 1, 0, 1))[:, :, 1::2, 1::2]
    torch.testing.assert_close(out[:, 1:], odd)


def test_shake_shake_mixes_with_alpha_forward_and_beta_backward_per_image():
    """With ones and zeros as branches the output is alpha; the gradients of the branches are beta and 1 - beta."""
    torch.manual_seed(0)
    n = 4000
    first, second = torch.ones(n, 2, 1, 1, requires_grad=True), torch.zeros(n, 2, 1, 1, requires_grad=True)
    out = ShakeShake()(first, second)
    out.sum().backward()
    alpha, beta = out[:, 0, 0, 0].detach(), first.grad[:, 0, 0, 0]
    assert torch.equal(out[:, 0], out[:, 1])  # one coefficient for all channels of an image
    torch.testing.assert_close(second.grad[:, 0, 0, 0], 1 - beta)
    for draws in (alpha, beta):  # uniform on (0, 1)
        assert draws.min() >= 0
        assert draws.max() <= 1
        assert draws.mean().item() == pytest.approx(0.5, abs=4 * math.sqrt(1 / 12 / n))
        assert draws.var().item() == pytest.approx(1 / 12, rel=0.1)
    assert abs(torch.corrcoef(torch.stack([alpha, beta]))[0, 1].item()) < 4 / math.sqrt(n)


def test_shake_drop_multiplies_as_its_paper_says():
    """b + alpha - b alpha forward with alpha in (-1, 1), b + beta - b beta backward with beta in (0, 1), b ~ B(p)."""
    torch.manual_seed(0)
    n, p = 20_000, 0.7
    x = torch.ones(n, 2, 1, 1, requires_grad=True)
    out = ShakeDrop(p)(x)
    out.sum().backward()
    forward, backward = out[:, 0, 0, 0].detach(), x.grad[:, 0, 0, 0]
    alive = forward == 1
    assert alive.float().mean().item() == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / n))
    assert torch.equal(backward[alive], torch.ones(int(alive.sum())))
    alpha, beta = forward[~alive], backward[~alive]
    assert alpha.min() < -0.99
    assert alpha.mean().item() == pytest.approx(0, abs=4 * math.sqrt(1 / 3 / len(alpha)))
    assert alpha.var().item() == pytest.approx(1 / 3, rel=0.1)
    assert beta.min() >= 0
    assert beta.mean().item() == pytest.approx(0.5, abs=4 * math.sqrt(1 / 12 / len(beta)))
    assert forward.mean().item() == pytest.approx(p, abs=0.03)  # the factor of evaluation


def test_evaluation_uses_the_expected_coefficients():
    x = torch.rand(3, 2, 4, 4)
    torch.testing.assert_close(ShakeDrop(0.7).eval()(x), 0.7 * x)
    torch.testing.assert_close(ShakeShake().eval()(x, 3 * x), 2 * x)


@pytest.mark.parametrize("name", ["shake-shake-8-2x4d", "pyramidnet-11-6-shakedrop"])
def test_in_true_gradient_mode_the_gradient_is_that_of_the_forward_pass(name, monkeypatch):
    """The reference multiplies by the forward coefficient and leaves the rest to autograd; the noise is the same."""
    torch.manual_seed(0)
    network = build_model(Model(name=name), num_classes=3).double()
    x, y = torch.randn(6, 3, 8, 8, dtype=torch.float64), torch.arange(6) % 3

    def gradient():
        torch.manual_seed(1)
        loss = F.cross_entropy(network(x), y)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(network.parameters()))])

    shaken = gradient()
    with true_gradient(network):
        true = gradient()
    after = gradient()
    monkeypatch.setattr(RandomScale, "scale", lambda self, x, forward, backward: x * forward)
    torch.testing.assert_close(true, gradient(), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(shaken, true, rtol=1e-2, atol=1e-3)
    assert torch.equal(after, shaken)  # the mode ends with its block


def test_pyramid_widths_grow_by_alpha_over_n_and_end_at_sixteen_plus_alpha():
    widths = block_widths(90, 200)
    assert widths[-1] == 216
    assert all(abs(w - (16 + 200 * (k + 1) / 90)) <= 0.5 for k, w in enumerate(widths))


def test_shakedrops_survival_falls_linearly_to_one_half():
    assert survival_probabilities(4) == pytest.approx([0.875, 0.75, 0.625, 0.5])


@pytest.mark.parametrize("kind", ["safetensors", "pt", "wrapped", "ddp"])
def test_a_checkpoint_gives_its_weights_and_a_new_head_for_new_classes(kind, tmp_path):
    torch.manual_seed(0)
    donor = build_model(Model(name="wrn-10-1"), num_classes=10)
    weights = donor.state_dict()
    path = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pth")
    if kind == "safetensors":
        save_file(weights, path)
    else:
        content = {"module." + k: v for k, v in weights.items()} if kind == "ddp" else weights
        torch.save({"state_dict": content, "epoch": 3} if kind == "wrapped" else content, path)
    torch.manual_seed(1)
    same = build_model(Model(name="wrn-10-1", checkpoint=str(path)), num_classes=10)
    assert all(torch.equal(v, weights[k]) for k, v in same.state_dict().items())
    torch.manual_seed(1)
    moved = build_model(Model(name="wrn-10-1", checkpoint=str(path)), num_classes=7)
    assert moved.head.weight.shape[0] == 7
    assert moved.head.weight.std().item() == pytest.approx(0.01, rel=0.15)  # small, and the bias 0
    assert not moved.head.bias.any()
    assert torch.equal(moved.blocks[0].conv1.weight, donor.blocks[0].conv1.weight)
    torch.manual_seed(1)
    new = build_model(Model(name="wrn-10-1", checkpoint=str(path), head="new"), num_classes=10)
    assert not torch.equal(new.head.weight, donor.head.weight)
    with pytest.raises(ModelError, match=r"head is keep.*10 classes.*7 classes"):
        build_model(Model(name="wrn-10-1", checkpoint=str(path), head="keep"), num_classes=7)


class Malicious:
    def __reduce__(self):
        return (pytest.fail, ("a pickled object was executed",))


def pickled():
    return pickle.dumps(Malicious(), protocol=2)


def saved(content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("nowhere.pt", lambda: None, "there is no file"),
        ("evil.pt", pickled, "pickled objects are never loaded"),
        ("cut.safetensors", lambda: b"\x00" * 20, "cannot be read"),
        ("other.pt", lambda: saved(reference_model("wrn-16-1").state_dict()), "does not belong to this model"),
        ("list.pt", lambda: saved([1, 2]), "does not map names to tensors"),
    ],
)
def test_a_checkpoint_that_is_missing_damaged_foreign_or_more_than_tensors_is_refused(file, content, message, tmp_path):
    if (made := content()) is not None:
        (tmp_path / file).write_bytes(made)
    with pytest.raises(ModelError, match=message):
        build_model(Model(name="wrn-10-1", checkpoint=str(tmp_path / file)), num_classes=10)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Model(name="timm/vgg11", drop_connect=0.2), "model.drop_connect at 0"),
        (Model(name="timm/resnet51x"), r"no model 'resnet51x'.*resnet"),
    ],
)
def test_a_model_that_timm_does_not_have_is_explained(model, message):
    with pytest.raises(ModelError, match=message):
        build_model(model, num_classes=10)


def test_an_efficientnet_with_the_other_packages_names_is_recognized(tmp_path):
    """The same tensors in the same order, named as efficientnet_pytorch does."""
    torch.manual_seed(0)
    name = "timm/tf_efficientnet_lite0"
    donor = build_model(Model(name=name), num_classes=1000)
    renamed = {f"_layer{i}.{k.rpartition('.')[2]}": v for i, (k, v) in enumerate(donor.state_dict().items())}
    renamed = {("_conv_stem.weight" if i == 0 else k): v for i, (k, v) in enumerate(renamed.items())}
    torch.save(renamed, tmp_path / "lite.pth")
    network = build_model(Model(name=name, checkpoint=str(tmp_path / "lite.pth")), num_classes=102)
    assert network.classifier.weight.shape[0] == 102
    assert torch.equal(network.blocks[2][0].conv_dw.weight, donor.blocks[2][0].conv_dw.weight)
    assert torch.equal(network.bn2.running_var, donor.bn2.running_var)


def test_timms_networks_tell_their_head_and_their_statistics():
    network = build_model(Model(name="timm/tf_efficientnet_lite0"), num_classes=3)
    assert head_name(network) == "classifier"
    assert input_statistics(network) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    own = build_model(Model(name="wrn-10-1"), num_classes=3)
    assert head_name(own) == "head"
    assert input_statistics(own) is None


def test_frozen_batch_norm_normalizes_with_its_statistics_and_leaves_them():
    network = build_model(Model(name="wrn-10-1"), num_classes=3)
    set_training_mode(network, Model(checkpoint="weights.pt", freeze_batch_norm=True))
    before = {k: v.clone() for k, v in network.state_dict().items()}
    x = torch.randn(4, 3, 8, 8)
    out = network(x)
    network.eval()
    assert torch.equal(out, network(x))
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
    assert network.norm.weight.requires_grad


def test_a_resnet_of_li_et_al_is_read_under_its_own_names(tmp_path):
    """Their names (bn1, layer2.3.conv1, linear), under "state_dict", without the counters that old torch lacks."""
    torch.manual_seed(0)
    network = build_model(Model(name="resnet-20-noshort"), num_classes=10)
    theirs = {}
    for key, tensor in network.state_dict().items():
        name = key.replace("norm", "bn").replace("head", "linear")
        if name.startswith("blocks."):
            _, number, rest = name.split(".", 2)
            name = f"layer{int(number) // 3 + 1}.{int(number) % 3}.{rest}"
        if not key.endswith("num_batches_tracked"):
            theirs[name] = tensor.clone()
    path = tmp_path / "resnet.pth"
    torch.save({"acc": 90.1, "epoch": 300, "state_dict": theirs}, path)
    loaded = build_model(Model(name="resnet-20-noshort", checkpoint=str(path), head="keep"), num_classes=10)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(loaded.eval()(x), network.eval()(x))
    other = Model(name="resnet-32-noshort", checkpoint=str(path))
    with pytest.raises(ModelError, match="does not belong"):
        build_model(other, num_classes=10)
