"""The two-pass form: where the first pass began, and a second pass that draws the same noise from the same buffers."""

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from flatmin.core.pass_state import PassState
from flatmin.core.rng import RandomState

if TYPE_CHECKING:
    from flatmin.core.step_passes import StepPasses

NOISE_ERROR = (
    "The second pass did not draw the noise of the first: {names} ended elsewhere. Call opt.zero_grad() after drawing "
    "the batch and right before the first pass, or pass model= to SAM and call that model; and run the same code on "
    "the same batches in both passes. flatmin.check_pass(opt, closure) finds what differs."
)

_open_blocks: list["Replay"] = []  # of all optimizers: the outermost one looks after the generators
_num_steps = 0  # of all optimizers, SAM or not


@functools.cache
def _count_steps() -> None:
    def count(*_: Any) -> None:
        global _num_steps
        _num_steps += 1

    register_optimizer_step_post_hook(count)


class Replay:
    """Records where the user's first pass began, and makes the second one begin there.

    It begins at the first forward pass of ``model`` since the last step, or at ``opt.zero_grad()`` before it, because
    noise may be drawn before the model is called (latents of a GAN). ``zero_grad()`` may also come between forward and
    backward, or right after the last step: the gradients say whether there was a backward pass since. If there was
    none, what came before the step of any optimizer was another pass (of the other network of a GAN), after which
    weights differ.
    """

    def __init__(self, passes: "StepPasses") -> None:
        self._passes = passes
        self._handles: list[Any] = []
        self.is_paused = False  # in closures, whose passes SAM runs itself
        # Whether passes call the model in eval mode too, where it reads running statistics: as in the last step.
        self.reads_statistics = self._has_read_statistics = False
        self._num_replayed: int | None = None  # forward passes in the block; None outside
        self.forget()

    def forget(self) -> None:
        """Begin a new step."""
        self._zeroed: PassState | None = None
        self._zeroed_after = 0  # which step of any optimizer
        self._zeroed_late = False  # a forward pass had been recorded before
        self._forwards: list[RandomState] = []
        self._forwards_after = 0
        self._first_forward: PassState | None = None

    def watch(self, model: nn.Module | None) -> None:
        """Record the forward passes of a model, and no longer another model's."""
        for handle in self._handles:
            handle.remove()
        hook = _ForwardHook(self)
        self._handles = [module.register_forward_pre_hook(hook, prepend=True) for module in _called_modules(model)]
        if self._handles:
            _count_steps()

    def at_zero_grad(self) -> None:
        """Record that the gradients were reset."""
        if not self.is_paused:
            self._zeroed, self._zeroed_late = self._passes.start(), bool(self._forwards)
            self._zeroed_after = _num_steps

    def at_eval(self) -> None:
        """Record that the model is called in eval mode, within a pass as far as one can tell."""
        self._has_read_statistics |= self.is_paused or self._zeroed is not None or self._num_replayed is not None

    def end_step(self) -> None:
        """Begin a new step after the optimizer's."""
        self.reads_statistics, self._has_read_statistics = self._has_read_statistics, False
        self.forget()

    def at_forward(self) -> None:
        """Record a forward pass of the first pass, or put the generators where they were in the first pass."""
        if self.is_paused:
            return
        if self._num_replayed is not None:
            self._replay_forward()
            return
        # What came before a zero_grad() or a step without a backward pass was another pass.
        is_another = self._zeroed_late or self._forwards_after != _num_steps
        if is_another and self._passes.state.marks.num_backwards() == 0:
            self._forwards, self._zeroed_late = [], False
        if not self._forwards:
            self._forwards_after, self._first_forward = _num_steps, self._passes.start()
            self._forwards.append(self._first_forward.random)
        else:
            self._forwards.append(self._random_state())

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Start a second pass where the first one began; raise at the end unless its generators end where they did."""
        zeroed = None if self._zeroed_late else self._zeroed
        begin = self._first_forward if self._forwards else zeroed
        # A model that was not called: after another optimizer's step nobody knows what it was in the first pass.
        if begin is not None and (self._forwards or self._zeroed_after == _num_steps):
            # Another optimizer may have moved parameters of the same model, which are not ours to put back.
            begin.model.begin_again(without=[p for block in _open_blocks for p in block._passes.parameters()])
        is_outermost = not _open_blocks
        _open_blocks.append(self)
        try:
            with self._same_noise(zeroed) if is_outermost else contextlib.nullcontext():
                yield
        finally:
            _open_blocks.remove(self)
            self.forget()

    @contextlib.contextmanager
    def _same_noise(self, zeroed: PassState | None) -> Iterator[None]:
        self._after = self._set = self._random_state()
        if zeroed is not None or self._forwards:
            self._put(zeroed.random if zeroed is not None else self._forwards[0])
        self._num_replayed = 0
        try:
            yield
            now = self._random_state()
            moved = now.differences(self._set)
            if names := [name for name in now.differences(self._after) if name in moved]:
                raise ValueError(NOISE_ERROR.format(names=" and ".join(names)))
        finally:
            self._num_replayed = None
            self._after.restore()

    def _replay_forward(self) -> None:
        index, self._num_replayed = self._num_replayed or 0, (self._num_replayed or 0) + 1
        if index >= len(self._forwards):
            return
        now = self._random_state()
        # Before the first forward pass the user may have drawn noise again; if not, it was drawn for other things.
        if index > 0 or not now.differences(self._set):
            self._put(self._forwards[index])

    def _put(self, state: RandomState) -> None:
        state.restore()
        self._set = state

    def _random_state(self) -> RandomState:
        return RandomState(dict.fromkeys(p.device for p in self._passes.parameters()))


def _called_modules(model: nn.Module | None) -> Iterator[nn.Module]:
    """Yield the modules that are called: those inside containers, which are not."""
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        for module in model.children():
            yield from _called_modules(module)
    elif model is not None:
        yield model


class _ForwardHook:
    """Reports the forward passes that a gradient is computed of. Copies of the model, saved ones too, have no part."""

    def __init__(self, record: Replay) -> None:
        self._record = weakref.ref(record)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        record = self._record()
        if record is not None and not module.training:
            record.at_eval()
        if record is not None and torch.is_grad_enabled():
            record.at_forward()

    def __reduce__(self) -> Any:
        return getattr, ({}, "get")  # as a hook, this returns the arguments it is given, and needs no flatmin
