"""The first step of a loop, run as DistributedDataParallel runs it, and kept so that it can be measured.

The loop's loss is not known here. Kept are the calls of the model with their arguments, the gradients of its outputs,
and the bytes that the loss took: enough to run the same forward and backward passes through the model. Where the loop
calls parts of the model (``vae.decode(z)``), the calls of the units in it are kept, each as if it were one of the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.model.hooks import ReentrantPasses
from mdcs.model.module_hooks import ModuleHook, tensors_in
from mdcs.model.optimizers import Optimizers
from mdcs.profiler.job_identity import described
from mdcs.runtime import optimizer_state
from mdcs.runtime.buffers import broadcast
from mdcs.runtime.errors import RunError
from mdcs.runtime.gradient_scaling import LossScale
from mdcs.runtime.parameter_access import WITH_GRADIENTS
from mdcs.runtime.state_dict import units_of
from mdcs.runtime.validation import RunOptions
from mdcs.telemetry.memory_meter import TOTAL, UNTAGGED, Reading, current_meter
from mdcs.torch_compat import (
    at_end_of_backward,
    backward_pass,
    in_function_forward,
    mark_stepped,
    tree_map_only,
    version_of,
)

if TYPE_CHECKING:
    from mdcs.runtime.checkpointing import ResumeInfo

_ONE_CALL = "the measured step's loss must come from the outputs of model(…), or of its layers"


@dataclass(eq=False)
class Call:
    """One call of the model or a unit of it, and the gradients of its outputs, in the order of the outputs.

    ``has_casts``: autocast still has the copies of weights that the call before made: they are in one context.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: Callable[[], AbstractContextManager[Any]]
    cast: str = ""
    has_casts: bool = False
    gradients: list[Tensor | None] = field(default_factory=list)

    def again(self) -> Any:
        """Call the module again."""
        with self.autocast():
            return self.module(*self.args, **self.kwargs)


class FirstStep:
    """Listens to the model until :meth:`finish`. Parameters and buffers are rank 0's from now on. Collective.

    - ``options``: those of the run; clipping and the loss scale are applied.
    - ``parts``: modules whose calls are kept where they are not inside of one of the model, or of another.
    - ``micro_steps``: backward passes so far, without side passes (:class:`mdcs.model.hooks.Listener`).
    - ``accumulates``: the loop is in ``no_sync()``.
    - ``norm``: the gradients' norm before clipping, once reduced; None without ``clip_norm``.
    """

    def __init__(
        self, model: nn.Module, optimizers: Optimizers, options: RunOptions, parts: Sequence[nn.Module] = ()
    ) -> None:
        self.model, self.optimizers, self.options = model, optimizers, options
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._device = self._trained[0].device
        self._meter = current_meter(self._device)
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._probe = torch.zeros(1, 1, device=self._device, requires_grad=True)
        self._cast: Any = None
        self.norm: float | None = None
        self.accumulates = False
        self.forget()
        if self._world > 1:
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    broadcast(tensor.data, None)
        self._handles: list[Any] = [p.register_post_accumulate_grad_hook(self._accumulated) for p in self._trained]
        for module in {model, *parts}:
            self._handles += [
                module.register_forward_pre_hook(ModuleHook(self._called), with_kwargs=True, prepend=True),
                module.register_forward_hook(ModuleHook(self._returned), always_call=True),
            ]

    def forget(self) -> None:
        """Give up the passes so far, and their gradients."""
        # before the first backward pass; those in no_sync() as long as there are no others
        self._calls: list[Call] = []
        self._checkpointed: list[Call] = []  # in reentrant checkpoints, which backward has not run again
        self._are_side, self._forwards, self.micro_steps = False, 0, 0
        self._is_reduced, self._is_finite = False, True
        self._in_backward = self._in_side_backward = False
        self._depth = 0  # calls under way, one inside of the other
        self._loss_bytes = 0
        self._before_loss: Reading | None = None
        self._versions: dict[nn.Parameter, tuple[int, int]] = {}
        self._reentrant = ReentrantPasses(self._trained)
        for p in self._trained:
            p.grad = None

    # -- what the loop does

    @property
    def _has_gradients(self) -> bool:
        return (torch.is_grad_enabled() or in_function_forward()) and any(p.requires_grad for p in self._trained)

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if backward_pass() != -1:  # activation checkpointing
            self._begin_backward()
            return
        self._reentrant.note_forward(0)
        if self._depth > 1:
            return
        if not self._has_gradients or self.accumulates and self._calls and not self._are_side:
            return
        if self._are_side and not self.accumulates:
            self._calls, self.micro_steps = [], 0
        self._are_side = self.accumulates
        self._forwards += not self.accumulates
        if not self.micro_steps:
            args, kwargs = tree_map_only(Tensor, _without_graph, (args, kwargs))
            self._calls.append(Call(module, args, kwargs, *_autocast(self._device), self._has_casts()))

    def _has_casts(self) -> bool:
        """Return whether autocast has kept what it made for the call before: then its node in the graph is the same."""
        with torch.enable_grad():
            node = (self._probe @ self._probe).grad_fn.next_functions[0][0]  # type: ignore[union-attr]  # of the copy
        before, self._cast = self._cast, node
        return before is node and torch.is_autocast_enabled(self._device.type)

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth or not self._has_gradients or not self._calls:
            return
        if backward_pass() != -1:
            again = next((call for call in self._checkpointed if call.module is module), None)
            if again is not None and torch.is_grad_enabled():
                self._checkpointed.remove(again)
                self._keep_gradients(again, output)
            return
        is_kept = not self.micro_steps and self._are_side == self.accumulates
        call = self._calls[-1] if is_kept else Call(module, (), {}, *_autocast(self._device))
        if torch.is_grad_enabled():
            self._keep_gradients(call, output)
        else:
            self._checkpointed.append(call)
        self._meter.window()
        self._before_loss = self._meter.live()

    def _keep_gradients(self, call: Call, output: Any) -> None:
        outputs = [t for t in tensors_in(output) if t.requires_grad]
        call.gradients = [None] * len(outputs)
        for i, tensor in enumerate(outputs):
            tensor.register_hook(self._gradient_of(call, i))

    def _gradient_of(self, kept: Call, index: int) -> Callable[[Tensor], None]:
        held = ref(kept)  # weak: the loop may hold the loss, and so these hooks, through the next step

        def hook(gradient: Tensor) -> None:
            self._begin_backward()
            call = held()
            if call is not None and call in self._calls and not self._in_side_backward:
                with self._meter.tag("parameters"):  # no part of a step: must not count as activations
                    known = call.gradients[index]
                    call.gradients[index] = gradient.detach().clone() if known is None else known + gradient.detach()

        return hook

    def _begin_backward(self) -> None:
        if not self._in_backward:
            if self._is_reduced:
                raise RunError(
                    f"rank {self.rank}, step 1: backward ran again after clip_grad_norm_(): it comes after the last "
                    "backward pass of a step, and step() or zero_grad() after it"
                )
            self._in_backward = True
            self._in_side_backward = not self._reentrant.begin_backward()
            self._loss_bytes = max(self._loss_bytes, _untagged(self._meter.window()) - _untagged(self._before_loss))
            at_end_of_backward(self._backward_ended)

    def _backward_ended(self) -> None:
        self._in_backward = False
        self.micro_steps += not (self._in_side_backward or self.accumulates)

    def _accumulated(self, p: Any) -> None:
        if self.accumulates:  # the loop may drop it
            self._versions.pop(p, None)
        else:
            self._versions[p] = id(p.grad), version_of(p.grad)

    # -- the end of the step

    def reduce(self) -> None:
        """Average the gradients over the ranks, unscale and clip them, once. Collective.

        Raises RunError before backward, and for gradients that the loop has changed.
        """
        if not any(g is not None for call in self._calls for g in call.gradients):
            raise RunError(
                f"rank {self.rank}, step 1: step() needs a forward and a backward pass before it: {_ONE_CALL}"
            )
        for name, p in self.model.named_parameters():
            if p in self._versions and (p.grad is None or self._versions[p] != (id(p.grad), version_of(p.grad))):
                raise RunError(
                    f"rank {self.rank}, step 1: the gradient of {name} was changed by the loop. {WITH_GRADIENTS}"
                )
        if self._is_reduced:
            return
        self._is_reduced = True
        self._average()
        self._is_finite = self.options.loss_scale is None or self._unscale(self.options.loss_scale)
        if self.options.clip_norm is not None:
            self.norm = float(nn.utils.clip_grad_norm_(self._trained, self.options.clip_norm))
        if self.options.clip_value is not None:
            nn.utils.clip_grad_value_(self._trained, self.options.clip_value)
        self._versions = {p: (id(p.grad), version_of(p.grad)) for p in self._trained if p.grad is not None}

    def finish(self) -> None:
        """Reduce the gradients, and update all parameters. Collective.

        With a loss scale the update is left out if a gradient has overflowed.
        """
        self.reduce()
        for handle in self._handles:
            handle.remove()
        self.micro_steps = max(1, self.micro_steps)
        self._calls = self._calls[: max(1, round(self._forwards / self.micro_steps))]
        for optimizer in self.optimizers.members:
            if self._is_finite:
                type(optimizer).step(optimizer)
            mark_stepped(optimizer)
        for p in self._trained:
            p.grad = None

    @torch.no_grad()
    def _average(self) -> None:
        if self._world == 1:
            return
        used = torch.tensor([p.grad is not None for p in self._trained], dtype=torch.int32, device=self._device)
        dist.all_reduce(used)
        for p, count in zip(self._trained, used.tolist(), strict=True):
            if count:  # as DDP with find_unused_parameters: a rank without a gradient has zeros
                gradient = torch.zeros_like(p) if p.grad is None else p.grad / self._world
                dist.all_reduce(gradient)
                p.grad = gradient

    @torch.no_grad()
    def _unscale(self, scale: LossScale) -> bool:
        """Undo the loss scale, and adapt it; return whether all gradients are finite."""
        gradients = [p.grad for p in self._trained if p.grad is not None]
        for gradient in gradients:
            gradient.mul_(1 / scale.value)
        is_finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        scale.update(is_finite)
        return is_finite

    # -- again

    def again(self) -> Tensor:
        """Run the forward passes of the first micro-step again; return a loss with the same gradients of the outputs.
        """
        outputs: list[Tensor] = []
        with ExitStack() as autocast:  # whose outermost context has the copies of weights
            for call in self._calls:
                if not call.has_casts:
                    autocast.close()
                    autocast.enter_context(call.autocast())
                outputs += [t for t in tensors_in(call.again()) if t.requires_grad]
        gradients = [g for call in self._calls for g in call.gradients]
        pairs = [(t, g) for t, g in zip(outputs, gradients, strict=True) if g is not None]
        loss: Tensor = _Loss.apply([g for _, g in pairs], max(0, self._loss_bytes), *(t for t, _ in pairs))
        return loss

    def in_words(self) -> str:
        """Return all that is known of the passes: arguments, autocast, which outputs have gradients, the loss's bytes.
        """
        names = {module: name for name, module in self.model.named_modules()}
        calls = (
            f"{names[c.module]} {described(c.args)} {described(c.kwargs)} {c.cast}{'+' * c.has_casts} "
            f"{described(c.gradients)}"
            for c in self._calls
        )
        return f"{'; '.join(calls)}; {round(self._loss_bytes / 1024)} KiB"  # the loop's own scalars come and go

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    # -- what the session does before its plan, with a model that is whole

    def evaluate(self, weights: str | None) -> AbstractContextManager[None]:
        """Run without gradients. ``weights``: optimizer state that takes the place of parameters; None: none."""
        return self._with_weights(weights, torch.no_grad())

    def full_parameters(
        self, names: Sequence[str], writeback: bool, weights: str | None
    ) -> AbstractContextManager[None]:
        """Hold whole parameters in the model, which they are."""
        units_of(self.model, (), names, "full_parameters()")
        return self._with_weights(weights, self._written_back() if writeback else nullcontext())

    @contextmanager
    def _with_weights(self, weights: str | None, context: AbstractContextManager[Any]) -> Iterator[None]:
        found = [(p, own[weights]) for p, own in self.optimizers.state.items() if weights in own]
        with optimizer_state.exchanged(found), context:
            yield

    @contextmanager
    def _written_back(self) -> Iterator[None]:
        yield
        with torch.no_grad():
            for p in self.model.parameters() if dist.is_initialized() else ():
                broadcast(p.data, None)

    def state_dict(self, keep: bool, cpu: bool) -> dict[str, Tensor]:
        """Return a copy of the model's state dict if this rank is to ``keep`` it, else an empty one."""
        named = self.model.state_dict() if keep else {}
        return {name: v.to("cpu", copy=True) if cpu else v.clone() for name, v in named.items()}

    def resume(self, path: Path) -> ResumeInfo | None:
        """Load a checkpoint, whole. Collective."""
        from mdcs.runtime.checkpointing import resume_whole  # late: importing DCP takes most of a second

        return resume_whole(path, self.model, self.optimizers.members, self._device)


class _Loss(torch.autograd.Function):
    """A loss with known gradients, which takes as many bytes for a moment as the loop's did."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], scratch: int, *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        torch.empty(scratch, dtype=torch.uint8, device=outputs[0].device)
        return outputs[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, None, *(g.clone() for g in ctx.gradients)


def _without_graph(tensor: Tensor) -> Tensor:
    """Return an argument without the graph that it came from, which has been freed."""
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()


def _autocast(device: torch.device) -> tuple[Callable[[], AbstractContextManager[Any]], str]:
    """Return a function that makes the present autocast context, and the context in words."""
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=enabled), f"{dtype}" if enabled else ""


def _untagged(reading: Reading | None) -> int:
    found = (reading or {}).get(UNTAGGED) or (reading or {}).get(TOTAL)
    return found or 0


