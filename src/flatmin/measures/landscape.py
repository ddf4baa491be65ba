r"""Loss landscapes: the loss on a line or a plane through the weights (Figure 1; Li et al., 2018)."""

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatmin.measures import plots
from flatmin.measures.batches import Batch, digest, leaves, measuring
from flatmin.measures.curvature import HessianOperator
from flatmin.measures.objective import LossFn, NoErrorRateError, Objective
from flatmin.measures.parameters import Params, parameter_names, unflatten, unwrapped
from flatmin.measures.points import Index, PointCache, Progress
from flatmin.measures.spectrum import top_eigenvalues

CENTRE_TOLERANCE = 1e-3  # far above rounding, on any machine; far below what another loss or model gives


@dataclass(frozen=True)
class Landscape:
    """The loss and accuracy on a grid of points :math:`w + a_i d_1 (+ a_j d_2)`."""

    loss: np.ndarray
    """Of shape (points,) or (points, points), with i first; with several models, one more dimension in front."""
    accuracy: np.ndarray
    """In the same shape; NaN where the outputs are not a classifier's."""
    coordinates: np.ndarray
    """The values of a, ascending, with an exact 0 in the middle."""
    labels: tuple[str, ...]
    """A name for each model."""
    directions: str
    """Either "random" or "hessian"."""

    def plot(
        self, kind: Literal["contour", "surface"] = "contour", metric: Literal["loss", "accuracy"] = "loss"
    ) -> "plots.Figure":
        """Return a matplotlib figure: curves in 1-D, contours or surfaces in 2-D, models on one scale."""
        return plots.landscape(self, kind, metric)

    def save_html(self, path: str | os.PathLike[str], metric: Literal["loss", "accuracy"] = "loss") -> None:
        """Write a page with the surfaces of a 2-D landscape, to rotate in a browser; it works offline."""
        plots.landscape_page(self, path, metric)


def loss_landscape(
    models: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    loss_fn: LossFn,
    data: Iterable[Batch],
    *,
    dims: Literal[1, 2] = 2,
    span: float = 1.0,
    points: int = 51,
    directions: Literal["random", "hessian"] = "random",
    cache: str | os.PathLike[str] | None = None,
    seed: int = 0,
    move_1d: bool = False,
    batch_norm: Literal["running", "batch"] = "running",
    params: Params | None = None,
    progress: bool | None = None,
    group: dist.ProcessGroup | None = None,
    allow_nondeterministic: bool = False,
) -> Landscape:
    r"""Return the loss and the accuracy on a line or a square through the weights of models.

    Random directions are Gaussian, normalized per filter (Li et al., 2018). So models of one shape can be
    compared: all have the same draws, scaled to their own filters. The grid spans :math:`[-span, span]` in
    units of the direction, and its middle is the model itself, exactly.

    Args:
        models: a module, a sequence of modules of one shape, or names and modules.
        loss_fn: ``loss_fn(outputs, targets)``, the mean over a batch.
        data: an iterable of ``(inputs, targets)`` batches.
        dims: 1 for a line, 2 for a plane.
        span: how far to go.
        points: in each dimension; odd: the middle is on the grid.
        directions: "random", or "hessian" for the leading eigenvectors (each model's own, of norm 1).
        cache: a file that holds every finished point. A landscape that was interrupted, even killed, resumes
            from it.
        seed: of the directions.
        move_1d: whether biases and the weights of norm layers move as well.
        batch_norm: "running" normalizes with the statistics of the trained model at every point, as Li et al.
            did; "batch" with each batch's, as in training. The model's own statistics never change.
        params: restricts the directions to these parameters (of the first model) or names.
        progress: whether to write the time left to standard error; if None, where that is a terminal.
        group: each rank holds a shard of the data; only the first one uses the cache.
        allow_nondeterministic: allow a random model or random data.

    Raises:
        ValueError: if a setting is out of range, the models differ in shape, the loss is not finite at a
            model, or the cache belongs to another landscape (it is left as it was).

    Example:
        The loss w^2 / 2 at w = 2 along d = +-2, by filter normalization: (2 + 2 a)^2 / 2.

        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = model.weight.data.fill_(2.0)
        >>> half_square = lambda outputs, targets: (outputs**2).mean() / 2
        >>> measured = loss_landscape(model, half_square, [(torch.ones(3, 1), torch.zeros(3))], dims=1, points=3)
        >>> measured.coordinates.tolist(), sorted(measured.loss.tolist())
        ([-1.0, 0.0, 1.0], [0.0, 2.0, 8.0])
    """
    _check_settings(dims, span, points, directions, batch_norm)
    labels, several = _named(models)
    names = parameter_names(next(iter(labels.values())), params)
    objectives = [
        Objective(
            model,
            loss_fn,
            data,
            params=names,
            group=group,
            allow_nondeterministic=allow_nondeterministic,
            batch_statistics=batch_norm == "batch",
        )
        for model in labels.values()
    ]
    half = points // 2
    coordinates = span * np.arange(-half, half + 1) / half
    settings: dict[str, object] = {
        **{"dims": dims, "span": span, "points": points, "directions": directions},
        **{"seed": seed, "move_1d": move_1d, "batch_norm": batch_norm},
    }
    center = (half,) * dims
    # The center first: it shows at once whether a cache belongs to this loss.
    order = sorted(itertools.product(range(points), repeat=dims), key=lambda index: index != center)
    shape = (len(objectives), *(points,) * dims)
    loss, accuracy = np.full(shape, math.nan), np.full(shape, math.nan)
    points_file, finished = _open_cache(objectives, settings, cache)
    with points_file or nullcontext():
        for place, value in finished.items():
            loss[place], accuracy[place] = value
        bar = Progress("landscape", len(order) * len(objectives), done=len(finished), show=progress)
        for number, objective in enumerate(objectives):
            weights = objective.weights()
            if directions == "hessian":
                basis = hessian_directions(objective, dims, seed=seed)
            else:
                basis = random_directions(weights, dims, seed=seed, move_1d=move_1d)
            for index in order:
                place = (number, *index)
                known = finished.get(place)
                if known is not None and index != center:
                    continue
                measured = _evaluate(objective, _moved(weights, basis, [coordinates[i] for i in index]))
                if index == center:
                    _check_center(measured[0], known, cache)
                if known is None:
                    if points_file is not None:
                        points_file.add(place, *measured)
                    loss[place], accuracy[place] = measured
                    bar.advance()
    if not several:
        loss, accuracy = loss[0], accuracy[0]
    return Landscape(loss, accuracy, coordinates, tuple(labels), directions)


def random_directions(
    weights: Sequence[Tensor], num: int, *, seed: int = 0, move_1d: bool = False
) -> list[list[Tensor]]:
    r"""Return Gaussian directions, normalized per filter: :math:`d_i \lVert w_i \rVert / \lVert d_i \rVert`.

    A filter is a slice along dimension 0: the weights of one output (Li et al., 2018, Section 4). Biases and
    the weights of norm layers (one dimension or none) stay where they are, or count as one filter each if
    ``move_1d``. The same seed gives parallel filters for every model of the same shape, on every device.

    Example:
        >>> ((direction,),) = random_directions([torch.tensor([[3.0, 4.0], [0.0, 2.0]])], 1)
        >>> direction.norm(dim=1)
        tensor([5., 2.])
    """
    generator = torch.Generator().manual_seed(seed)
    directions = []
    for _ in range(num):
        # Also for the tensors that stay: move_1d does not change the draws of the others.
        noise = [torch.randn(w.shape, generator=generator, dtype=torch.float64) for w in weights]
        pairs = zip(noise, weights, strict=True)
        directions.append([_normalized(d.to(w.dtype).to(w.device), w, move_1d) for d, w in pairs])
    return directions


def _normalized(direction: Tensor, weight: Tensor, move_1d: bool) -> Tensor:
    if weight.ndim <= 1 and not move_1d:
        return torch.zeros_like(weight)
    filters = (1, -1) if weight.ndim <= 1 else (len(weight), -1)
    d, w = direction.reshape(filters), weight.reshape(filters)
    ratio = torch.linalg.vector_norm(w, dim=1, keepdim=True) / torch.linalg.vector_norm(d, dim=1, keepdim=True)
    return torch.reshape(d * ratio, weight.shape)


def hessian_directions(objective: Objective, num: int, *, seed: int = 0) -> list[list[Tensor]]:
    """Return the leading eigenvectors of the Hessian, of norm 1, each with its largest component positive."""
    weights = objective.weights()
    top = top_eigenvalues(HessianOperator.of(objective), num, seed=seed)
    columns = [column * column[column.abs().argmax()].sign() for column in top.vectors.unbind(1)]
    return [unflatten(column, weights) for column in columns]


def _moved(weights: list[Tensor], basis: list[list[Tensor]], steps: list[float]) -> list[Tensor]:
    """Return w + a d_1 + b d_2; exactly w where a = b = 0."""
    moved = list(weights)
    for direction, step in zip(basis, steps, strict=True):
        moved = [w + float(step) * d for w, d in zip(moved, direction, strict=True)]
    return moved


def _evaluate(objective: Objective, weights: list[Tensor]) -> tuple[float, float]:
    """Return the loss and the accuracy; NaN for the accuracy where there are no classes."""
    try:
        value = objective.value(weights, error=True)
    except NoErrorRateError:
        return objective.value(weights).loss, math.nan
    return value.loss, 1.0 - value.error


def _open_cache(
    objectives: list[Objective], settings: dict[str, object], path: str | os.PathLike[str] | None
) -> tuple[PointCache | None, dict[Index, tuple[float, float]]]:
    """Return the file of finished points, if there is one (the first rank's), and the points, known to every rank."""
    if path is None:
        return None, {}
    first, opened = objectives[0], []

    def data_digest() -> str:
        with measuring(first.data):
            return digest(itertools.chain.from_iterable(leaves(batch) for batch in first.data))

    header = {
        "models": [digest([*o.model.parameters(), *o.model.buffers()]) for o in objectives],
        "data": first.together(data_digest),
        "settings": {**settings, "params": first.names},
    }

    def read() -> dict[Index, tuple[float, float]]:
        if first.group is not None and dist.get_rank(first.group) > 0:
            return {}
        opened.append(PointCache(path, header))
        return dict(opened[0].points)

    known = first.together(read)[0]
    return (opened[0] if opened else None), known


def _check_center(loss: float, known: tuple[float, float] | None, cache: object) -> None:
    if not math.isfinite(loss):
        raise ValueError(f"The loss is {loss} at the model itself: there is no landscape to look at.")
    if known is not None and abs(known[0] - loss) > CENTRE_TOLERANCE * max(abs(loss), abs(known[0])):
        raise ValueError(
            f"The cache {cache} belongs to another loss: it has {known[0]:.6g} at the model itself, where "
            f"loss_fn gives {loss:.6g}. It was not changed. Choose another file."
        )


def _named(models: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]) -> tuple[dict[str, nn.Module], bool]:
    """Return the models by name, and whether there may be several; all have parameters of the same names and shapes."""
    if isinstance(models, nn.Module):
        return {"model": unwrapped(models)}, False
    named = dict(models) if isinstance(models, Mapping) else {f"model {i}": m for i, m in enumerate(models, 1)}
    if not named:
        raise ValueError("models is empty: pass a module, or several.")
    named = {name: unwrapped(model) for name, model in named.items()}
    shapes = [{name: tuple(p.shape) for name, p in model.named_parameters()} for model in named.values()]
    for number, other in enumerate(shapes[1:], 2):
        if other != shapes[0]:
            raise ValueError(
                f"Model {number} has parameters of other names or shapes than model 1, so there are no directions "
                "they share. Look at them one by one."
            )
    return named, True


def _check_settings(dims: int, span: float, points: int, directions: str, batch_norm: str) -> None:
    if dims not in (1, 2):
        raise ValueError(f"dims must be 1 or 2, got {dims!r}.")
    if not (span > 0 and math.isfinite(span)):
        raise ValueError(f"span must be positive and finite, got {span!r}.")
    if not isinstance(points, int) or points < 3 or points % 2 == 0:
        raise ValueError(f"points must be odd and at least 3, got {points!r}: the middle one is the model.")
    if directions not in ("random", "hessian"):
        raise ValueError(f'directions must be "random" or "hessian", got {directions!r}.')
    if batch_norm not in ("running", "batch"):
        raise ValueError(f'batch_norm must be "running" or "batch", got {batch_norm!r}.')
