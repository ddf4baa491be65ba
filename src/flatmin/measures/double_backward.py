r"""Convolutions, batch norms and ReLUs whose second derivatives cost no more than their first, on a CPU.

PyTorch differentiates a convolution's gradient by convolving transposed images, which gives up the layout that makes
the others fast (channels last), a batch norm's by a dozen elementary operations, and a ReLU's by adding zeros. But a
convolution is bilinear in its input and weight, and so is a batch norm in eval mode, apart from the mean it subtracts:
with :math:`y = B(x, w) + b` and the gradients :math:`(B_x^\top(g, w),\, B_w^\top(g, x))`, their product with a
direction :math:`(v_x, v_w, v_b)` has the derivatives

.. math:: B(v_x, w) + B(x, v_w) + v_b, \quad B_x^\top(g, v_w), \quad B_w^\top(g, v_x)

with respect to g, x and w: values and gradients of the same operation, by the same fast kernels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from flatmin.core.compat import has_saved_tensors_hooks

aten = torch.ops.aten


class TwiceDifferentiable(TorchFunctionMode):
    """While it is active, a model runs with the operations of this module, wherever they apply.

    Args:
        linear: the second derivative is taken in g only, as a product with the Jacobian needs it: half the work.
    """

    def __init__(self, *, linear: bool = False) -> None:
        super().__init__()
        self.linear = linear

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, or what stands in for it."""
        kwargs = kwargs or {}
        # A checkpoint runs again in the backward pass, outside of this mode, and has to find the same operations.
        hooked = has_saved_tensors_hooks()
        plain = all(kind is Tensor for kind in types)
        stand_in = STAND_INS.get(func) if plain and not hooked and not torch.is_autocast_enabled("cpu") else None
        result = None if stand_in is None else stand_in(*args, linear=self.linear, **kwargs)
        return func(*args, **kwargs) if result is None else result


class _Bilinear(Protocol):
    """An operation on inputs and weights, linear in each of them after a constant was subtracted."""

    def value(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """Return the outputs."""

    def gradients(self, g: Tensor, x: Tensor, w: Tensor, needed: Sequence[bool]) -> Any:
        """Return the gradients of <g, outputs> in x, w and b, where they are needed."""

    def linear(self) -> "_Bilinear":
        """Return the operation without the constant."""


@dataclass(frozen=True)
class _Convolution:
    """A convolution of images."""

    settings: tuple[Any, ...]

    def value(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return torch.convolution(x, w, b, *self.settings)

    def gradients(self, g: Tensor, x: Tensor, w: Tensor, needed: Sequence[bool]) -> Any:
        return aten.convolution_backward(g, x, w, [len(w)], *self.settings, needed)

    def linear(self) -> "_Convolution":
        return self


@dataclass(frozen=True)
class _BatchNorm:
    """A batch norm in eval mode, :math:`w (x - mean) / sqrt(var + eps) + b`."""

    mean: Tensor
    var: Tensor
    eps: float

    def value(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return torch.batch_norm(x, w, b, self.mean, self.var, False, 0.0, self.eps, False)

    def gradients(self, g: Tensor, x: Tensor, w: Tensor, needed: Sequence[bool]) -> Any:
        return aten.native_batch_norm_backward(g, x, w, self.mean, self.var, None, None, False, self.eps, needed)

    def linear(self) -> "_BatchNorm":
        return replace(self, mean=torch.zeros_like(self.mean))


class _Value(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, op: _Bilinear, linear: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.op, ctx.linear = op, linear
        return op.value(x, w, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = (t.detach() if ctx.linear else t for t in ctx.saved_tensors)
        return *_Gradients.apply(g, x, w, ctx.op, ctx.needs_input_grad[:3]), None, None  # type: ignore[no-untyped-call]


class _Gradients(Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, w: Tensor, op: _Bilinear, needed: Sequence[bool]) -> Any:
        ctx.save_for_backward(g, x, w)
        ctx.set_materialize_grads(False)
        ctx.op = op
        return tuple(op.gradients(g, x, w, needed))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, vx: Tensor | None, vw: Tensor | None, vb: Tensor | None) -> Any:
        g, x, w = ctx.saved_tensors
        # The kernels of batch norm take their weights for contiguous; a direction may be the column of a matrix.
        vw, vb = (None if v is None else v.contiguous() for v in (vw, vb))
        linear = ctx.op.linear()
        gg = None
        if vw is not None or vb is not None:
            gg = ctx.op.value(x, torch.zeros_like(w) if vw is None else vw, vb)
        if vx is not None:
            part = linear.value(vx, w, None)
            gg = part if gg is None else gg.add_(part)
        needed = (vw is not None and ctx.needs_input_grad[1], vx is not None and ctx.needs_input_grad[2], False)
        gx = gw = None
        if any(needed):
            gx, gw, _ = linear.gradients(g, x if vx is None else vx, w if vw is None else vw, needed)
        return gg, gx, gw, None, None


class _ReLU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.relu(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Masked.apply(g, *ctx.saved_tensors)  # type: ignore[no-untyped-call]


class _Masked(Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, y: Tensor) -> Any:
        ctx.save_for_backward(y)
        return aten.threshold_backward(g, y, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor) -> Any:
        return aten.threshold_backward(v, *ctx.saved_tensors, 0), None


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    linear: bool = False,
) -> Any:
    if input.ndim != 4 or input.is_complex() or isinstance(padding, str):
        return None
    stride, padding, dilation = ([n, n] if isinstance(n, int) else list(n) for n in (stride, padding, dilation))
    operation = _Convolution((stride, padding, dilation, False, [0, 0], groups))
    return _Value.apply(input, weight, bias, operation, linear)  # type: ignore[no-untyped-call]


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    linear: bool = False,
) -> Any:
    if training or weight is None or running_mean is None or running_var is None:
        return None
    return _Value.apply(input, weight, bias, _BatchNorm(running_mean, running_var, eps), linear)  # type: ignore[no-untyped-call]


def _relu(input: Tensor, inplace: bool = False, *, linear: bool = False) -> Any:
    return None if inplace else _ReLU.apply(input)  # type: ignore[no-untyped-call]


STAND_INS: dict[Any, Callable[..., Any]] = {
    torch.conv2d: _conv2d,
    F.batch_norm: _batch_norm,
    F.relu: _relu,
    torch.relu: _relu,
}
