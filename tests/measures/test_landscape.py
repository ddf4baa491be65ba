import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import flatmin
from flatmin.measures import HessianOperator, Landscape, loss_landscape, top_eigenvalues
from flatmin.measures.landscape import random_directions
from flatmin.measures.points import Progress
from measures.cases import Exponential, Quadratic, diagonal, flat_loss, mean_output, tanh_network


def convolutional(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, 4)
    ).double()
    model(torch.randn(16, 2, 4, 4, dtype=torch.float64))  # running statistics that differ from a batch's
    x, y = torch.randn(10, 2, 4, 4, dtype=torch.float64), torch.randint(4, (10,))
    return model.eval(), nn.CrossEntropyLoss(), list(zip(x.split(6), y.split(6), strict=True))


def test_directions_have_the_norm_of_each_filter():
    model, *_ = convolutional()
    weights = [p.detach() for p in model.parameters()]
    for direction in random_directions(weights, 2, seed=3):
        for d, w in zip(direction, weights, strict=True):
            if w.ndim == 1:
                assert not d.any()
            else:
                torch.testing.assert_close(d.flatten(1).norm(dim=1), w.flatten(1).norm(dim=1))
                assert not torch.allclose(d, w)


def test_one_dimensional_weights_move_as_one_filter_by_choice():
    weights = [torch.tensor([3.0, 4.0]), torch.ones(2, 2)]
    still = random_directions(weights, 1)[0]
    moving = random_directions(weights, 1, move_1d=True)[0]
    assert moving[0].norm().item() == pytest.approx(5.0, rel=1e-6)
    torch.testing.assert_close(still[1], moving[1])
    assert not random_directions([torch.zeros(2, 3)], 1)[0][0].any()  # a filter of zeros does not move


def test_directions_are_gaussian_before_they_are_normalized():
    """Within a filter of 10,000 the quartiles are those of a normal distribution."""
    w = torch.ones(1, 10_000, dtype=torch.float64)
    d = random_directions([w], 1)[0][0].flatten()
    assert float(d.std()) == pytest.approx(1.0, rel=0.02)
    assert float(d.quantile(0.75)) == pytest.approx(0.6745, abs=0.03)
    assert float((d.abs() > 2).double().mean()) == pytest.approx(0.0455, abs=0.01)


def test_every_point_is_the_loss_at_w_plus_a_d1_plus_b_d2():
    model, loss_fn, data = tanh_network()
    found = loss_landscape(model, loss_fn, data, span=2.0, points=5, seed=4)
    loss, w = flat_loss(model, loss_fn, data)
    weights = [p.detach() for p in model.parameters()]
    d1, d2 = (torch.cat([t.flatten() for t in d]) for d in random_directions(weights, 2, seed=4))
    for i, a in enumerate((-2.0, -1.0, 0.0, 1.0, 2.0)):
        assert found.coordinates[i] == a
        for j, b in enumerate((-2.0, -1.0, 0.0, 1.0, 2.0)):
            assert found.loss[i, j] == pytest.approx(float(loss(w + a * d1 + b * d2)), rel=1e-10)


def test_accuracy_is_that_of_the_moved_model():
    model, loss_fn, data = tanh_network()
    found = loss_landscape(model, loss_fn, data, dims=1, span=3.0, points=3)
    (direction,) = random_directions([p.detach() for p in model.parameters()], 1)
    for index, a in enumerate(found.coordinates):
        moved = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).double()
        with torch.no_grad():
            for p, w, d in zip(moved.parameters(), model.parameters(), direction, strict=True):
                p.copy_(w + a * d)
            right = sum(int((moved(x).argmax(1) == y).sum()) for x, y in data)
        assert found.accuracy[index] == pytest.approx(right / 20)


@pytest.mark.parametrize(("points", "span"), [(3, 0.1), (51, 1.0), (7, 1 / 3), (21, 0.7)])
def test_the_middle_of_the_grid_is_exactly_the_model(points, span):
    model, data = diagonal([1.0, 2.0, 3.0, 4.0])
    found = loss_landscape(model, mean_output, data, dims=1, points=points, span=span)
    assert found.coordinates[points // 2] == 0.0
    assert found.loss[points // 2] == mean_output(model(*data[0][0]), None).item()
    assert found.coordinates[0] == -span
    assert found.coordinates[-1] == span


def test_along_leading_eigenvectors_a_quadratic_is_a_parabola_of_their_eigenvalues():
    model, data = diagonal([1.0, 7.0, 3.0, 5.0], w=torch.zeros(4, dtype=torch.float64))
    found = loss_landscape(model, mean_output, data, directions="hessian", points=3, span=2.0)
    np.testing.assert_allclose(found.loss[2, 1], 7.0 * 2.0**2 / 2, rtol=1e-5)
    np.testing.assert_allclose(found.loss[1, 2], 5.0 * 2.0**2 / 2, rtol=1e-3)
    np.testing.assert_allclose(found.loss[2, 2], 24.0, rtol=1e-3)


def test_eigenvector_directions_are_those_of_top_eigenvalues():
    model, loss_fn, data = tanh_network()
    found = loss_landscape(model, loss_fn, data, dims=1, directions="hessian", points=3, span=0.5)
    v = top_eigenvalues(HessianOperator(model, loss_fn, data), 1).vectors[:, 0]
    loss, w = flat_loss(model, loss_fn, data)
    ends = sorted([float(loss(w + 0.5 * v)), float(loss(w - 0.5 * v))])
    assert sorted(found.loss[[0, 2]]) == pytest.approx(ends, rel=1e-8)


def test_several_models_have_the_same_draws_each_scaled_to_its_own_filters():
    first, loss_fn, data = tanh_network(seed=0)
    second, *_ = tanh_network(seed=1)
    both = loss_landscape({"one": first, "two": second}, loss_fn, data, points=3)
    assert both.loss.shape == (2, 3, 3)
    assert both.labels == ("one", "two")
    for number, model in enumerate((first, second)):
        alone = loss_landscape(model, loss_fn, data, points=3)
        assert alone.loss.shape == (3, 3)
        np.testing.assert_array_equal(both.loss[number], alone.loss)
    d1, d2 = (random_directions([p.detach() for p in m.parameters()], 1)[0][0] for m in (first, second))
    cosine = (d1 * d2).sum(1) / (d1.norm(dim=1) * d2.norm(dim=1))
    torch.testing.assert_close(cosine, torch.ones_like(cosine))


def test_batch_norm_uses_its_running_statistics_or_each_batchs_own_by_choice():
    model, loss_fn, data = convolutional()
    running = loss_landscape(model, loss_fn, data, dims=1, points=3)
    batch = loss_landscape(model, loss_fn, data, dims=1, points=3, batch_norm="batch")
    with torch.no_grad():
        expected = sum(float(loss_fn(model(x), y)) * len(x) for x, y in data) / 10
        assert running.loss[1] == pytest.approx(expected, rel=1e-12)
        before = model.state_dict()["1.running_mean"].clone()
        model.train()
        expected = sum(float(loss_fn(model(x), y)) * len(x) for x, y in data) / 10
        assert batch.loss[1] == pytest.approx(expected, rel=1e-12)
    assert not torch.equal(before, model.state_dict()["1.running_mean"])  # the reference changed it, not the measure


def test_params_leaves_all_other_weights_where_they_are():
    model, loss_fn, data = tanh_network()
    found = loss_landscape(model, loss_fn, data, dims=1, points=3, params=[model[2].weight])
    (direction,) = random_directions([model[2].weight.detach()], 1)
    loss, w = flat_loss(model, loss_fn, data, ["2.weight"])
    assert found.loss[2] == pytest.approx(float(loss(w + direction[0].flatten())), rel=1e-12)


def test_a_loss_that_overflows_far_away_is_kept_as_it_is():
    data = [(torch.ones(2, dtype=torch.float64), torch.zeros(2))]
    found = loss_landscape(Exponential(), mean_output, data, dims=1, points=3, span=1e4)
    assert sorted(found.loss)[-1] == math.inf
    assert np.isnan(found.accuracy).all()
    assert found.plot().axes
    with pytest.raises(ValueError, match="not a classifier"):
        found.plot(metric="accuracy")


class Counting(nn.Module):
    """Counts its forward passes outside of its state."""

    passes = 0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 2).double()

    def forward(self, x):
        type(self).passes += 1
        return self.inner(x)


def counting_case():
    torch.manual_seed(1)
    return (
        Counting(),
        nn.CrossEntropyLoss(),
        [(torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1] * 3))],
    )


def test_a_finished_landscape_is_read_from_its_cache(tmp_path):
    case = counting_case()
    path = tmp_path / "folder" / "landscape.jsonl"
    first = loss_landscape(*case, points=5, cache=path)
    content = path.read_bytes()
    Counting.passes = 0
    again = loss_landscape(*case, points=5, cache=path)
    assert Counting.passes <= 5  # four of the probe, and the center that proves the cache
    np.testing.assert_array_equal(first.loss, again.loss)
    np.testing.assert_array_equal(first.accuracy, again.accuracy)
    assert path.read_bytes() == content
    assert os.listdir(path.parent) == ["landscape.jsonl"]
    header, *lines = map(json.loads, content.decode().splitlines())
    assert header["settings"]["points"] == 5
    assert sorted(tuple(line[:3]) for line in lines) == [(0, i, j) for i in range(5) for j in range(5)]


def test_every_point_is_on_disk_before_the_next_one_begins(tmp_path):
    model, loss_fn, data = counting_case()
    path = tmp_path / "cache"
    seen = []

    def watching(outputs, targets):
        seen.append(len(path.read_bytes().splitlines()) - 1 if path.exists() else -1)
        return loss_fn(outputs, targets)

    loss_landscape(model, watching, data, points=5, cache=path)
    assert seen == [-1] * 4 + list(range(25))  # the probe, and then each point finds all those before it


def test_a_line_that_was_half_written_is_done_again(tmp_path):
    case = counting_case()
    path = tmp_path / "cache"
    expected = loss_landscape(*case, points=3, cache=path)
    path.write_bytes(path.read_bytes()[:-9])
    found = loss_landscape(*case, points=3, cache=path)
    np.testing.assert_array_equal(found.loss, expected.loss)
    lines = path.read_bytes().split(b"\n")
    assert len(lines) == 1 + 9 + 1 + 1  # the header, nine points and the torn one, and the end
    Counting.passes = 0
    np.testing.assert_array_equal(loss_landscape(*case, points=3, cache=path).loss, expected.loss)
    assert Counting.passes == 5


KILLED = """
import sys, time, torch
from torch import nn
from flatmin.measures import loss_landscape
from measures.test_landscape import counting_case
model, loss_fn, data = counting_case()
def slow(outputs, targets):
    time.sleep(0.01)
    return loss_fn(outputs, targets)
loss_landscape(model, slow, data, points=31, cache=sys.argv[1])
"""


def test_a_killed_landscape_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "cache"
    roots = [str(Path(flatmin.__file__).parents[1]), str(Path(__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(roots), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], env=environment)
    while process.poll() is None and not (path.exists() and path.read_bytes().count(b"\n") > 20):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    finished = len(path.read_text().splitlines()) - 1
    assert 20 <= finished < 31**2
    case = counting_case()
    Counting.passes = 0
    found = loss_landscape(*case, points=31, cache=path)
    assert Counting.passes <= 31**2 - finished + 7
    np.testing.assert_array_equal(found.loss, loss_landscape(*case, points=31).loss)


@pytest.mark.parametrize("change", ["weights", "buffers", "data", "span", "seed", "loss"])
def test_the_cache_of_another_landscape_is_refused_and_left_alone(tmp_path, change):
    model, loss_fn, data = convolutional()
    path = tmp_path / "cache"
    loss_landscape(model, loss_fn, data, dims=1, points=3, cache=path)
    content = path.read_bytes()
    settings = {}
    if change == "weights":
        with torch.no_grad():
            model[4].bias[0] += 1e-9
    elif change == "buffers":
        model[1].running_mean[0] += 1e-9
    elif change == "data":
        data = [(x + 1e-9, y) for x, y in data]
    elif change == "loss":
        loss_fn = nn.CrossEntropyLoss(label_smoothing=0.5)
    else:
        settings = {change: 2}
    with pytest.raises(ValueError, match=r"belongs to another (landscape|loss).*not changed"):
        loss_landscape(model, loss_fn, data, dims=1, points=3, cache=path, **settings)
    assert path.read_bytes() == content


def test_a_file_that_is_no_cache_is_refused_and_left_alone(tmp_path):
    for content in (b"precious", b'{"precious": 1}\n', b"\x00\xff"):
        path = tmp_path / "file"
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not a landscape's cache; it was not changed"):
            loss_landscape(*counting_case(), points=3, cache=path)
        assert path.read_bytes() == content
    with pytest.raises(ValueError, match="is a directory"):
        loss_landscape(*counting_case(), points=3, cache=tmp_path)


@pytest.mark.parametrize("change", ["another number", "huge", "twice"])
def test_a_point_that_was_edited_is_measured_again(change, tmp_path):
    case, path = counting_case(), tmp_path / "cache"
    expected = loss_landscape(*case, points=3, cache=path)
    *lines, last = path.read_text().splitlines()
    *index, loss, accuracy, checksum = json.loads(last)
    wrong = json.dumps([*index, 1e308 if change == "huge" else loss + 0.1, accuracy, checksum])
    path.write_text("\n".join([*lines, *([last, wrong] if change == "twice" else [wrong])]) + "\n")
    np.testing.assert_array_equal(loss_landscape(*case, points=3, cache=path).loss, expected.loss)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dims": 3}, "dims must be 1 or 2, got 3"),
        ({"span": 0.0}, "span must be positive and finite, got 0.0"),
        ({"points": 10}, "points must be odd and at least 3, got 10: the middle one is the model"),
        ({"points": 1}, "points must be odd and at least 3"),
        ({"directions": "pca"}, 'directions must be "random" or "hessian", got \'pca\''),
        ({"batch_norm": "eval"}, 'batch_norm must be "running" or "batch", got \'eval\''),
    ],
)
def test_bad_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        loss_landscape(*counting_case(), **settings)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([], "models is empty"),
        ([tanh_network()[0], nn.Linear(4, 7)], "Model 2 has parameters of other names or shapes"),
        (Quadratic(torch.full((2,), math.nan)), "The loss is nan"),
    ],
)
def test_models_that_cannot_be_drawn_are_refused(models, message):
    data = tanh_network()[2]
    if isinstance(models, Quadratic):
        data = [((torch.eye(2)[None], torch.zeros(1, 2)), torch.zeros(1))]
    with pytest.raises(ValueError, match=message):
        loss_landscape(models, mean_output, data, dims=1, points=3)


def test_progress_is_silent_unless_it_is_asked_for_or_at_a_terminal(capsys):
    loss_landscape(*counting_case(), dims=1, points=3)
    assert capsys.readouterr() == ("", "")
    loss_landscape(*counting_case(), dims=1, points=3, progress=True)
    assert "3/3 (100%), 0:00 left" in capsys.readouterr().err


def test_progress_tells_the_time_left_by_the_speed_of_the_new_points(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    clock = iter([0.0, 10.0, 20.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    stream = Terminal()
    progress = Progress("grid", 10, done=5, stream=stream)
    progress.advance()
    assert "6/10 (60%), 0:40 left" in stream.getvalue()
    progress.advance()
    assert "7/10 (70%), 0:30 left" in stream.getvalue()
    silent = Terminal()
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    Progress("grid", 1, show=False, stream=silent).advance()
    assert silent.getvalue() == ""


def landscape_of(num, dims):
    coordinates = np.linspace(-1, 1, 5)
    bowl = coordinates**2 if dims == 1 else coordinates[:, None] ** 2 + 3 * coordinates**2
    loss = np.stack([(1 + number) * bowl for number in range(num)])
    labels = tuple(f"model {number}" for number in range(num))
    return Landscape(loss, 1 - loss / 10, coordinates, labels, "random")


@pytest.mark.parametrize("kind", ["contour", "surface"])
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_pictures_show_every_model_on_one_scale(kind, dims, metric, tmp_path):
    found = landscape_of(2, dims)
    figure = found.plot(kind, metric)
    figure.savefig(tmp_path / "figure.png")
    if dims == 2:
        titles = [axes.get_title() for axes in figure.axes]
        assert titles[:2] == ["model 0", "model 1"]
    if dims == 2 and kind == "surface":
        assert figure.axes[0].get_zlim() == figure.axes[1].get_zlim()


def test_the_page_shows_every_model_the_right_way_round(tmp_path):
    found = landscape_of(2, 2)
    found.save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "model 0" in page
    assert "cdn.plot" not in page.split("Plotly.newPlot")[-1]
    with pytest.raises(ValueError, match="save_html needs a 2-D landscape"):
        landscape_of(1, 1).save_html(tmp_path / "page.html")
    with pytest.raises(ValueError, match='kind must be "contour" or "surface"'):
        found.plot("heat")
    with pytest.raises(ValueError, match='metric must be "loss" or "accuracy"'):
        found.plot(metric="error")
