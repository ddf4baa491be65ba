"""What a pass depends on beside the weights and the batch, and what it leaves behind: a pass must be repeatable."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from flatmin.core import ddp
from flatmin.core.dtensor import is_sharded, local_part
from flatmin.core.gradients import drop_gradients
from flatmin.core.rng import RandomState

if TYPE_CHECKING:
    from flatmin.core.step_passes import StepPasses

Tensors = dict[str, Tensor | None]
MOST_FOLLOWERS = 2  # per trained parameter: a model may have two teachers


class _Saved(NamedTuple):
    tensors: Tensors  # of a module: where it looks the tensor up
    name: str
    tensor: Tensor
    data: Tensor | None  # the tensor's memory, of ordinary tensors; a pass may give it another one
    copy: Tensor | None


class ModelState:
    """A copy of what passes change in a model, put back by ``restore()``, in place.

    That is **every** buffer: running statistics of batch norm, queues, codebooks, vectors of spectral norm, ranges of
    quantization observers. And parameters that are not trained but may follow those that are, like an EMA teacher's.
    This leaves compiled graphs, SyncBatchNorm and third-party layers alone, unlike setting ``momentum = 0``, which
    still counts batches. Layers are looked up each time, because they may be replaced during training.

    A large frozen model is not copied (LoRA): of each shape at most two parameters for each trained one. The others
    get back the memory that they had, so a pass may assign to ``p.data``. Without ``statistics`` the
    running statistics of batch norm are left out, which a forward pass in training mode writes and does not read.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module | None, parameters: Iterable[Tensor] = (), *, statistics: bool = True) -> None:
        self._saved: list[_Saved] = []
        self._ddp = ddp.unwrap(model)
        # Whether the next forward pass replaces the buffers by rank 0's.
        self._is_shared_next = getattr(self._ddp, "require_forward_param_sync", None)
        if model is None:
            return
        parameters = list(parameters)
        trained = {id(p): p.shape for p in parameters if p.requires_grad}
        sharded = any(map(is_sharded, parameters))  # FSDP2 puts others in their place while a pass runs
        others: list[tuple[Tensors, str, Tensor]] = []
        for module in model.modules():
            if statistics or not _only_counts(module):
                for name, buffer in module._buffers.items():
                    if buffer is not None and not nn.parameter.is_lazy(buffer):
                        self._saved.append(_save(module._buffers, name, buffer))
            for name, p in module._parameters.items() if not sharded else ():
                if p is not None and id(p) not in trained and not nn.parameter.is_lazy(p):
                    others.append((cast(Tensors, module._parameters), name, p))
        if others:
            limits, counts = Counter(trained.values()), Counter(p.shape for _, _, p in others)
            for tensors, name, other in others:
                follows = counts[other.shape] <= MOST_FOLLOWERS * limits[other.shape]
                self._saved.append(_save(tensors, name, other, copy=follows))

    def holds(self, tensor: object) -> bool:
        """Return whether a tensor's numbers were saved."""
        return any(saved.tensor is tensor and saved.copy is not None for saved in self._saved)

    @torch.no_grad()
    def restore(self, *, without: Iterable[Tensor] = ()) -> None:
        """Put the values back in the tensors that had them, but for some parameters."""
        left_out = {id(p) for p in without}
        for tensors, name, tensor, data, copy in self._saved:
            if id(tensor) in left_out:
                continue
            if data is not None:
                tensors[name] = tensor  # a layer may have assigned a new one, or new memory, or resized it
                if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
                    tensor.data = data
            if copy is not None:
                (local_part(tensor) if data is None else tensor).copy_(copy)

    def begin_again(self, *, without: Iterable[Tensor] = ()) -> None:
        """Put the values back for another pass, which under DDP starts from rank 0's buffers if the last one did."""
        self.restore(without=without)
        if self._saved and self._is_shared_next is not None:
            self._ddp.require_forward_param_sync = self._is_shared_next


def _save(tensors: Tensors, name: str, tensor: Tensor, *, copy: bool = True) -> _Saved:
    if type(tensor) in (Tensor, nn.Parameter):
        return _Saved(tensors, name, tensor, tensor.data, tensor.clone() if copy else None)
    # Sharded or quantized: only the numbers.
    return _Saved(tensors, name, tensor, None, local_part(tensor).clone() if copy else None)


class PassState:
    """All that a pass starts from: the generators, and what in the model can enter its forward pass.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        >>> start = PassState(model, model.parameters())
        >>> first = model(torch.ones(1, 2))
        >>> start.restore()
        >>> torch.equal(first, model(torch.ones(1, 2)))
        True
    """

    def __init__(self, model: nn.Module | None, parameters: Iterable[Tensor], *, statistics: bool = False) -> None:
        parameters = list(parameters)
        self.random = RandomState(dict.fromkeys(p.device for p in parameters))
        self.model = ModelState(model, parameters, statistics=statistics)

    def restore(self) -> None:
        """Make the next pass start from here."""
        self.random.restore()
        self.model.begin_again()


@contextlib.contextmanager
def own_buffers(models: Iterable[nn.Module]) -> Iterator[None]:
    """Give models copies of their buffers within the block, so nothing that happens there is left."""
    saved = [(m._buffers, dict(m._buffers)) for model in models for m in model.modules() if m._buffers]
    for buffers, originals in saved:
        buffers.update({name: buffer if buffer is None else buffer.clone() for name, buffer in originals.items()})
    try:
        yield
    finally:
        for buffers, originals in saved:
            buffers.update(originals)


def _only_counts(module: nn.Module) -> bool:
    """Return whether a layer's buffers are statistics that it writes but does not read while it trains."""
    own = (type(module).forward.__module__ or "").startswith("torch.nn.modules.")  # None: made by exec
    return own and isinstance(module, _NormBase)


def has_running_statistics(model: nn.Module | None) -> bool:
    """Return whether a pass of the model, in its present mode, updates running statistics."""
    modules: Iterator[nn.Module] | tuple[()] = model.modules() if model is not None else ()
    return any(m.training and any(name.startswith("running_") for name in m._buffers) for m in modules)


# Passes that leave everything as it was.


@contextlib.contextmanager
def generators_unchanged(batches: object, devices: Iterable[torch.device]) -> Iterator[None]:
    """Leave the global generators of the CPU and these devices, and a data loader's own, as they were."""
    sources: list[Any] = [batches, getattr(batches, "sampler", None)]
    generators = [of.generator for of in sources if isinstance(getattr(of, "generator", None), torch.Generator)]
    states, random_state = [generator.get_state() for generator in generators], RandomState(devices)
    try:
        yield
    finally:
        random_state.restore()
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextlib.contextmanager
def unchanged(passes: "StepPasses", batches: Iterable[Any] = ()) -> Iterator[ModelState]:
    """Put back gradients, the model's state, generators, SAM's own state, its functions' and DDP's flags as they were.

    There are no gradients at the start of the block. The state of the model is yielded.
    """
    replay, state, own = passes.replay, passes.state, list(passes.parameters())
    model = ddp.unwrap(state.model)
    parameters = list(dict.fromkeys([*own, *(model.parameters() if model is not None else ())]))
    grads = [p.grad for p in parameters]
    # A reduction writes into these gradients, even if the parameters do not have them anymore.
    overwritten = grads if getattr(model, "gradient_as_bucket_view", False) else []
    copies = [None if grad is None else grad.clone() for grad in overwritten]
    before = ModelState(state.model, own)
    was_paused, replay.is_paused = replay.is_paused, True
    marks, state.marks = state.marks, dataclasses.replace(state.marks)
    drop_gradients(parameters)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(generators_unchanged(batches, {p.device for p in parameters}))
            for function in passes.functions:
                stack.enter_context(function.unchanged())
            yield before
    finally:
        replay.is_paused, state.marks = was_paused, marks
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad
        for grad, copy in zip(overwritten, copies, strict=True):
            if grad is not None and copy is not None:
                grad.data.copy_(copy)  # .data does not count as a write, which SAM looks at
        before.begin_again()
