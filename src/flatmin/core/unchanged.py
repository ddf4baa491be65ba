"""Passes that leave an optimizer and its model as they were."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from flatmin.core import ddp
from flatmin.core.pass_state import ModelState
from flatmin.core.rng import RandomState
from flatmin.core.sam import SAM


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
def unchanged(opt: SAM, batches: Iterable[Any] = ()) -> Iterator[ModelState]:
    """Put back gradients, the model's state, generators, SAM's own state, its functions' and DDP's flags as they were.

    There are no gradients at the start of the block. The state of the model is yielded.
    """
    own = list(opt._passes.parameters())
    parameters = list(dict.fromkeys([*own, *(opt.model.parameters() if opt.model is not None else ())]))
    model = ddp.unwrap(opt.model)
    flag = getattr(model, "require_forward_param_sync", None)
    grads = [p.grad for p in parameters]
    # A reduction writes into these gradients, even if the parameters do not have them anymore.
    overwritten = grads if getattr(model, "gradient_as_bucket_view", False) else []
    copies = [None if grad is None else grad.clone() for grad in overwritten]
    before = ModelState(opt.model, own)
    replay, state = opt._passes.replay, opt._state
    was_paused, replay.is_paused = replay.is_paused, True
    marks, state.marks = state.marks, dataclasses.replace(state.marks)
    for p in parameters:
        p.grad = None
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(generators_unchanged(batches, {p.device for p in parameters}))
            for function in opt._passes.functions:
                stack.enter_context(function.unchanged())
            yield before
    finally:
        replay.is_paused, state.marks = was_paused, marks
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad
        for grad, copy in zip(overwritten, copies, strict=True):
            if grad is not None and copy is not None:
                grad.data.copy_(copy)  # .data does not count as a write, which SAM looks at
        if flag is not None:
            model.require_forward_param_sync = flag
        before.restore()
