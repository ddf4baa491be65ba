"""SAM as a torch optimizer that wraps a built one."""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatmin.core import checks, ddp, dtensor
from flatmin.core.batch_split import Batch, call_with, split_batch
from flatmin.core.checks import MIGRATION, Closure, Direction, Settings, check_generator, check_rho
from flatmin.core.compat import check_not_in_grad_scaler, is_checkpoint, is_unscaling
from flatmin.core.joint_optimizer import as_one, bases_of
from flatmin.core.optimizer_wrapper import NotCompiledContext, OptimizerWrapper, not_compiled, with_own_hooks
from flatmin.core.rng import direction_generator
from flatmin.core.step_functions import CombineFunction
from flatmin.core.step_gradient import PerturbedPass, closure_gradient, micro_batch_gradient, perturbed_block
from flatmin.core.step_passes import FUNCTION_KEYS, GENERATOR_KEY, RHO_KEY, FirstPass, StepPasses
from flatmin.core.step_state import SAMMetrics, StepState


class SAM(OptimizerWrapper):
    r"""Sharpness-Aware Minimization (Foret et al., 2021) around any optimizer.

    A step computes the gradient g at w, moves to the point of the neighborhood where the linearized loss is highest,

    .. math:: \hat\epsilon = \rho \operatorname{sign}(g) |g|^{q-1} / (\lVert g \rVert_q^q)^{1/p}, \quad 1/p + 1/q = 1,

    (Eq. 2; for p = 2 that is :math:`\rho g / \lVert g \rVert_2`), computes the gradient there, returns to w, and lets
    the base optimizer step with that gradient (Eq. 3). The norm is joint over all parameters.

    There are four ways to take a step::

        loss = opt.step(closure)                # 1. a closure: zero the gradients, loss, backward, return the loss

        opt.zero_grad()                         # 2. two visible passes: AMP, accumulation, clipping, any trainer
        loss = loss_fn(model(x), y)
        loss.backward()
        with opt.perturbed():
            loss_fn(model(x), y).backward()
        opt.step()

        opt.step([closure_1, closure_2])        # 3. m-sharpness: one perturbation per micro-batch (Section 4.1)

        opt.step_batch(loss_fn, (x, y), part=1/8)   # 4. cheap SAM: 1.125 passes instead of 2

    SAM shares ``param_groups`` and ``state`` with its base: schedulers may hold either, and a state dict of one can be
    loaded into the other. A parameter group may have its own radius under the key ``sam_rho``: then
    :math:`\epsilon = T\, dual_p(T g)` with T the group's radius, still with one joint norm. 0 takes the group out.

    Guarantees: weights come back exactly, even if an exception is raised; a zero or non-finite gradient gives
    :math:`\epsilon = 0`; nothing synchronizes with the device (except the first call of a function that you pass); all
    passes draw the same noise and, with ``model``, start from the same buffers. A closure is called twice, so it must
    not draw a new batch (:func:`flatmin.check_pass`).

    Args:
        base: a built optimizer, such as ``torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)``. Or a list of
            them, each with its own parameters, such as ``[muon, adamw]``: one perturbation with one joint norm over
            all, one set of passes, and then each takes its step.
        rho: the radius of the neighborhood; :func:`flatmin.suggest_rho` finds its scale. May be changed between steps
            by assigning to ``opt.rho``, which is part of the state dict. With 0 a step is one plain pass, exactly the
            base optimizer's.
        p: the norm of the neighborhood, in [1, inf].
        adaptive: ASAM (Kwon et al., 2021): :math:`T = \rho (|w| + \eta)`. A float is eta; True is 0.01. Its rho is
            larger than SAM's: 0.5 to 2.
        ascent_steps: how many steps of projected gradient ascent find :math:`\epsilon` (Appendix C.6). A step costs
            ``ascent_steps + 1`` passes; more than one needs p in {1, 2, inf}, a closure, and another copy of the
            parameters.
        direction: "gradient"; "random" for a Gaussian direction of the same norm (Appendix C.5), without the first
            pass unless ``model`` has running statistics that must come from it; or "momentum" for
            :math:`\epsilon = -\rho v / \lVert v \rVert` with v the base's momentum (Momentum-SAM, Becker et al., 2024),
            which costs one pass and needs a rho of 1 to 3. Or a function, ``fn(grads) -> directions``: lists with one
            tensor per parameter in ``opt.perturbed_parameters``. It is called for each ascent, without autograd, and
            its result is scaled to the neighborhood as the gradient would be.
        weight: the factor c of the correction: a step uses :math:`g + c\, (g(w + \epsilon) - g)`. None is full
            strength: 1 divided by the share of the examples that are corrected, so the mean over examples is SAM's. 0
            is the base optimizer. Any c but 1 needs one more copy of the gradients.
        combine: a function in place of ``weight``, ``fn(grads, perturbed_grads) -> grads``: lists with the gradients at
            w and at w + eps of all trainable parameters, in the order of groups. It is called for each closure; its
            result takes the place of :math:`g(w + \epsilon)`, so with a rest the step uses
            :math:`g_{batch} + combined_{part} - g_{part}`. See the docs, page Variants, for both functions.
        generator: where random directions come from; part of the state dict. If None, one is made from
            ``torch.initial_seed()`` (and the worker's rank, where each has its own perturbation). Generators given to
            several workers must be seeded alike for sharded parameters (HSDP: within a replica) or a shared
            perturbation, else differently.
        model: the model, as you call it (so the DistributedDataParallel or compiled one). With it, all passes start
            from the same buffers (and EMA teachers), the first pass decides what is left of them, and under DDP it
            stays on its worker, under HSDP within its replica. Assign to ``opt.model`` after wrapping or compiling it.
        sync_perturbation: under DDP, share one perturbation, for two reductions of gradients per step. By default each
            worker has its own, as the paper recommends, which needs one reduction. Under HSDP: one per replica.

    Raises:
        TypeError: base is not an optimizer instance, or one that needs a closure itself.
        ValueError: an argument out of its range, or a parameter in two base optimizers.

    Example:
        For :math:`L(w) = w^2 / 2` at w = 1, the gradient is taken at 1 + rho:

        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> opt = SAM(torch.optim.SGD([w], lr=0.1), rho=0.5)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = (w**2).sum() / 2
        ...     loss.backward()
        ...     return loss
        >>> opt.step(closure)
        tensor(0.5000)
        >>> w.data
        tensor([0.8500])
    """

    settings: Settings

    def __new__(cls, *args: Any, **kwargs: Any) -> "SAM":
        """Say what to write instead of ``SAM(params, SGD, lr=0.1)``, as in other libraries."""
        if len(args) > 1 or kwargs.keys() & {"base_optimizer", "lr", "params"}:
            raise TypeError(f"SAM takes one positional argument, a built optimizer. {MIGRATION}")
        return super().__new__(cls)

    def __init__(
        self,
        base: Optimizer | Sequence[Optimizer],
        *,
        rho: float = 0.05,
        p: float = 2.0,
        adaptive: bool | float = False,
        ascent_steps: int = 1,
        direction: Direction = "gradient",
        weight: float | None = None,
        combine: CombineFunction | None = None,
        generator: torch.Generator | None = None,
        model: nn.Module | None = None,
        sync_perturbation: bool = False,
    ) -> None:
        base = as_one(base)
        if any(isinstance(one, SAM) for one in bases_of(base)):
            raise TypeError("base is a SAM already: wrap the optimizer inside it, once.")
        settings = Settings(
            p=checks.check_p(p),
            eta=checks.check_adaptive(adaptive),
            ascent_steps=checks.check_ascent_steps(ascent_steps, p, direction),
            direction=direction,
            weight=checks.check_weight(weight),
            combine=checks.check_combine(combine, weight, direction),
            sync_perturbation=sync_perturbation,
        )
        check_generator(generator)
        self.__setstate__(
            {"base": base, "settings": settings, "generator": generator, "rho": check_rho(rho), "model": None}
        )
        self._passes.radii()
        for function in self._passes.functions:
            function.check_shards(self._passes.parameters())
        self.model = model
        self.rho = rho
        if direction == "random":
            shared = sync_perturbation or any(dtensor.is_sharded(p) for p in self._passes.parameters())
            replica = 0 if sync_perturbation else ddp.replica_of(model)
            device = next(self._passes.parameters()).device
            self.generator = generator or direction_generator(device, shared=shared, replica=replica)

    # What can be read and changed.

    @property
    def bases(self) -> tuple[Optimizer, ...]:
        """The base optimizers; ``base`` is the only one, or all of them as one."""
        return bases_of(self.base)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base optimizer's parameter groups."""
        if is_unscaling(depth=1):
            self._state.marks.at_unscaling(self._passes.parameters())
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base.param_groups = groups

    @property
    def rho(self) -> float:
        """The radius of the groups that do not set one."""
        return self._state.rho

    @rho.setter
    def rho(self, rho: float) -> None:
        self._state.rho = self.param_groups[0][RHO_KEY] = check_rho(rho)

    @property
    def generator(self) -> torch.Generator | None:
        """Where random directions come from."""
        return self._passes.generator

    @generator.setter
    def generator(self, generator: torch.Generator | None) -> None:
        self._passes.generator = check_generator(generator)
        self._keep_generator()

    @property
    def model(self) -> nn.Module | None:
        """The model whose buffers and gradient reduction SAM looks after. May be assigned to."""
        return self._state.model

    @model.setter
    def model(self, model: nn.Module | None) -> None:
        ddp.check_model(model, self._passes.parameters(), self.settings.sync_perturbation)
        self._state.model = model
        self._passes.replay.watch(model)

    @property
    def p(self) -> float:
        """The norm of the neighborhood. Like the settings below, it cannot be changed."""
        return self.settings.p

    @property
    def eta(self) -> float | None:
        """ASAM's eta; None for plain SAM."""
        return self.settings.eta

    @property
    def ascent_steps(self) -> int:
        """The number of ascent steps."""
        return self.settings.ascent_steps

    @property
    def direction(self) -> Direction:
        """Where the perturbation points."""
        return self.settings.direction

    @property
    def weight(self) -> float | None:
        """The factor of the correction; None is full strength."""
        return self.settings.weight

    @property
    def combine(self) -> CombineFunction | None:
        """The function that makes the step's gradient of both gradients."""
        return self.settings.combine

    @property
    def perturbed_parameters(self) -> list[Tensor]:
        """What ``direction=fn`` gets the gradients of: parameters with ``requires_grad`` and a radius above 0.

        In the order of groups, each once. One without a gradient is given as zeros.
        """
        return self._passes.perturbed_parameters(self._passes.radii())

    @property
    def sync_perturbation(self) -> bool:
        """Whether workers share one perturbation."""
        return self.settings.sync_perturbation

    @property
    def metrics(self) -> SAMMetrics:
        """What the last step measured."""
        return self._state.metrics

    @property
    def is_perturbed(self) -> bool:
        """Whether the weights are at w + eps now; in a closure, log and count what is measured where this is False."""
        return self._state.is_perturbed

    @property
    def needs_perturbed_pass(self) -> bool:
        """Whether the next step needs a pass at w + eps; if not, ``step()`` may follow the first pass.

        False while every radius or the weight is 0, and in the first step of ``direction="momentum"``.
        """
        return self._passes.needs_perturbed_pass()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimizer; it may have its own radius ``sam_rho``."""
        if "sam_rho" in param_group:
            check_rho(param_group["sam_rho"], "sam_rho")
        self.base.add_param_group(param_group)

    @not_compiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        marks = self._state.marks
        if marks.is_held:
            return
        if not self._state.is_perturbed:
            marks.revoke_step()  # a new step begins
            self._passes.replay.at_zero_grad()
        marks.zeroed = True
        self.base.zero_grad(set_to_none)
        marks.forget_backwards()

    # Steps.

    @not_compiled
    def perturbed(self, loss: Tensor | None = None) -> AbstractContextManager[PerturbedPass]:
        r"""Move to :math:`w + \epsilon` within the block, with the direction of the gradients on entry.

        The gradients are reset on entry; the next ``step()`` uses the gradients of the pass within the block. On exit,
        after an exception too, w comes back exactly, and buffers and generators are as the first pass left them. The
        block draws the noise of the first pass, which begins where ``model`` is called or, if that comes first, at
        ``opt.zero_grad()``. Without ``model``, call that after the batch was drawn, right before the first pass.

        Gradients from several backward passes before the block, and again within it, are gradient accumulation with one
        shared perturbation. Gradients of a scaled loss need no unscaling before the block: :math:`\epsilon` does not
        depend on the scale. Backward passes after the block add to the gradients (the rest of the batch, say).

        Args:
            loss: the loss of the first pass, for ``opt.metrics``. With it, set ``loss`` of what the block yields, and
                ``metrics.sharpness`` is their difference::

                    with opt.perturbed(loss) as second:
                        second.loss = loss_fn(model(x), y)
                        second.loss.backward()

        Raises:
            ValueError: within another ``perturbed()``, without gradients, with gradients of a block that no ``step()``
                has used, or with ``ascent_steps`` above 1, which needs a closure; at the end, if the block drew other
                noise than the first pass, or ran fewer backward passes.
        """
        return NotCompiledContext(perturbed_block(self._passes, loss))

    @overload  # type: ignore[override]
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Closure, *, ascent: Closure | None = None) -> Tensor | None: ...
    @overload
    def step(self, closure: Closure, *, rest: Closure, weights: Sequence[float]) -> Tensor: ...
    @overload
    def step(
        self, closure: Sequence[Closure], *, rest: Closure | None = None, weights: Sequence[float] | None = None
    ) -> Tensor: ...

    @with_own_hooks
    def step(
        self,
        closure: Closure | Sequence[Closure] | None = None,
        *,
        ascent: Closure | None = None,
        rest: Closure | None = None,
        weights: Sequence[float] | None = None,
    ) -> Tensor | None:
        """Take a step.

        Args:
            closure: a function that zeroes the gradients, computes the loss, calls ``backward()`` and returns the loss;
                or a list of them, one per micro-batch, each of which gets its own perturbation (m-sharpness): the
                average of their SAM gradients is used, for which one more copy of the gradients is needed. None after
                a pass within ``perturbed()``.
            ascent: another closure that the direction comes from (a part of the batch, say). Each is called once.
            rest: the closure of the examples that SAM is not applied to: one plain pass, at w. Needs ``weights``.
            weights: how much each closure counts, such as its number of examples, and the rest last; equal if None.

        Returns:
            The loss at w (the weighted mean of all closures). With ``ascent``, or where no first pass was needed, the
            loss at w + eps. None without a closure.

        Raises:
            TypeError: neither a closure nor a pass within ``perturbed()`` came before, or the closure returned no loss.
            ValueError: arguments that do not go together, or a closure passed through a GradScaler.
        """
        self._state.check_not_perturbed("step()")
        if closure is None:
            self._step_ready()
            return None
        check_not_in_grad_scaler()
        several = not callable(closure)
        if not several and rest is None and weights is not None:
            raise ValueError("weights goes with a list of closures, or with rest: one weight for each.")
        closures = checks.check_closures(closure) if not callable(closure) else [closure]
        if ascent is not None and (several or rest is not None):
            raise ValueError(
                "ascent goes with one closure, not with a list or a rest: there each closure gives its own direction."
            )
        if ascent is not None and not self.settings.follows_gradient:
            raise ValueError(
                f'ascent gives the direction, but direction="{self.settings.direction}" needs none. Leave one out.'
            )
        if several or rest is not None:
            loss = self._micro_batch_gradient(closures, rest, checks.shares_of(closures, rest, weights))
            self._base_step()
            return loss
        first = None
        if ascent is None and self._state.marks.step_allowed(self._passes.parameters()):
            first = self._passes.call_after_a_pass(closures[0])
            if first is None:
                self._step_ready()
                return None
        loss = self._closure_gradient(closures[0], ascent, first)
        self._base_step()
        return loss

    @not_compiled
    def step_batch(
        self, loss_fn: Callable[..., Tensor], batch: Batch, *, part: float = 1.0, m: int | None = None
    ) -> Tensor:
        r"""Take a step on a batch, of which SAM corrects the first ``part``: SAM at 1 + part passes instead of 2.

        With :math:`\epsilon = \rho\, g_{part} / \lVert g_{part} \rVert` the step uses

        .. math:: g = g_{batch}(w) + g_{part}(w + \epsilon) - g_{part}(w),

        an unbiased estimate of m-SAM's gradient with m the size of the part. Its rho is smaller than SAM's; measure it
        with ``suggest_rho(..., m=...)``, the size of the part. It zeroes the gradients, splits the batch, runs the
        backward passes and weights the losses. Batches must be shuffled: the first examples stand for all. Running
        statistics of batch norm come from the rest of the batch.

        Args:
            loss_fn: returns the **mean** loss of the examples it is given: ``loss_fn(*batch)`` for a tuple or list,
                ``loss_fn(batch)`` for a tensor or dict.
            batch: a tensor, or a tuple, list or dict of tensors with the examples along their first dimension.
            part: the share of the batch, in (0, 1], that SAM is applied to.
            m: how many examples share a perturbation (m-sharpness, Section 4.1); all of the part if None.

        Returns:
            The mean loss of the batch at w.

        Raises:
            TypeError, ValueError: the batch cannot be split that way; the message names the argument and the fix.

        Example:
            >>> x, w = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.nn.Parameter(torch.tensor([1.0]))
            >>> opt = SAM(torch.optim.SGD([w], lr=0.01), rho=0.1)
            >>> opt.step_batch(lambda x: ((x * w) ** 2).mean() / 2, x, part=1 / 2)
            tensor(3.7500)
            >>> w.data  # g_batch = 7.5, and the correction of the first two examples is 0.1 * (1 + 4) / 2
            tensor([0.9225])
        """
        self._state.check_not_perturbed("step_batch()")
        split = split_batch(batch, part, m)
        # Through step(), for all that torch and others put around it: hooks, profiling, the schedulers' order check.
        if len(split.sizes) == 1 or not self.needs_perturbed_pass:
            return cast(Tensor, self.step(self._closure(loss_fn, batch)))
        closures = [self._closure(loss_fn, piece) for piece in split.micro_batches]
        rest = None if split.rest is None else self._closure(loss_fn, split.rest)
        return self.step(closures, rest=rest, weights=split.sizes)

    def _closure(self, loss_fn: Callable[..., Tensor], batch: Any) -> Closure:
        def closure() -> Tensor:
            self.zero_grad()
            loss = checks.check_loss(call_with(loss_fn, batch))
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        return closure

    def _step_ready(self) -> None:
        """Take the base step after ``perturbed()``, or after the one pass of a plain step."""
        parameters = list(self._passes.parameters())
        if not self._state.marks.step_allowed(parameters):
            if is_checkpoint():
                self._passes.create_function_states()
                self.base.step()
                return
            if self.needs_perturbed_pass:
                raise TypeError(
                    "SAM.step() needs a closure, or a pass at the perturbed weights before it: SAM evaluates the loss "
                    "twice. Pass a function that zeroes the gradients, computes the loss, calls backward() and returns "
                    "the loss; or run the second pass, with its backward(), inside `with opt.perturbed():`. The "
                    "gradients of that pass must still be there: change them in place, or inside the block."
                )
            self._state.metrics = SAMMetrics(perturbation_norm=torch.zeros(()))
        self._base_step()
        self._state.marks.consume_step(parameters)

    # The gradient of a step, left in the parameters; the step itself is `_base_step`. Trainers need them apart.

    def _closure_gradient(
        self, closure: Closure, ascent: Closure | None = None, first: FirstPass | None = None
    ) -> Tensor:
        """Run the passes of one closure, and return the loss."""
        self._state.metrics, loss = closure_gradient(self._passes, closure, ascent, first)
        return loss

    def _micro_batch_gradient(self, closures: list[Closure], rest: Closure | None, shares: list[float]) -> Tensor:
        """Run the passes of several closures with one perturbation each, and a plain pass on the rest."""
        self._state.metrics, loss = micro_batch_gradient(self._passes, closures, rest, shares)
        return loss

    def _base_step(self) -> None:
        self.base.step()
        self._state.num_steps += 1
        self._passes.replay.end_step()

    # Checkpoints and copies.

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimizer's state dict; its first group also has SAM's radius, generator and functions."""
        self._keep_generator()
        state_dict = super().state_dict()
        state_dict["param_groups"][0][RHO_KEY] = self.rho  # another SAM around the same base may have its own
        for function in self._passes.functions:
            if function.has_state:
                state_dict["param_groups"][0][function.key] = function.state_dict(self._passes.parameters())
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of SAM or of its base optimizer, whose radii, having none, stay as they are."""
        rho, groups = self.rho, state_dict.get("param_groups", ())
        radii = [group.get("sam_rho") for group in self.param_groups]
        for group in groups:  # before anything changes
            check_rho(group.get("sam_rho", 0.0), "sam_rho")
            check_rho(group.get(RHO_KEY, 0.0), RHO_KEY)
            if self.generator is not None and group.get(GENERATOR_KEY) is not None:
                torch.Generator(self.generator.device).set_state(group[GENERATOR_KEY].cpu())
        with contextlib.ExitStack() as stack:
            for function in self._passes.functions:
                if function.has_state and groups and function.key in groups[0]:
                    stack.enter_context(function.unchanged(only_on_error=True))
                    function.load_state_dict(groups[0][function.key])
            super().load_state_dict(state_dict)
        for key in FUNCTION_KEYS:
            self.param_groups[0].pop(key, None)
        if RHO_KEY not in self.param_groups[0]:
            for group, radius in zip(self.param_groups, radii, strict=True):
                if radius is not None:
                    group.setdefault("sam_rho", radius)
        self.rho = self.param_groups[0].get(RHO_KEY, rho)
        self._state.marks.revoke_step()
        generator_state = self.param_groups[0].get(GENERATOR_KEY)
        if generator_state is not None and self.generator is not None:
            self.generator.set_state(generator_state.cpu())

    def _keep_generator(self) -> None:
        if self.generator is not None and self.direction == "random":
            self.param_groups[0][GENERATOR_KEY] = self.generator.get_state()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("base", "settings", "generator", "rho", "model")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        rest = dict(state)
        self._state = StepState(rho=rest.pop("rho"), model=rest.pop("model"))
        self._passes = StepPasses(rest["base"], rest["settings"], self._state, rest.pop("generator"))
        self._passes.replay.watch(self._state.model)
        self._state.marks.watch(self._passes.parameters())
        super().__setstate__(rest)

    def __repr__(self) -> str:
        settings = self.settings
        shown = f"rho={self.rho}, p={settings.p}"
        shown += f", adaptive={settings.eta}" if settings.eta is not None else ""
        shown += f", ascent_steps={settings.ascent_steps}" if settings.ascent_steps > 1 else ""
        shown += f", direction={settings.direction!r}" if settings.direction != "gradient" else ""
        shown += f", weight={settings.weight}" if settings.weight is not None else ""
        shown += f", combine={settings.combine!r}" if settings.combine is not None else ""
        return f"SAM({shown}, base={self.base!r})"


# __new__ takes anything, to say what is wrong with it.
SAM.__signature__ = inspect.signature(SAM.__init__)  # type: ignore[attr-defined]
