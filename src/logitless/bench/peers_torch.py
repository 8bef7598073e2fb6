"""The peers in torch: their losses from the same arrays, timed and brought back as numpy.

torch is imported when a program is made, never before: a process that measures JAX holds no torch, and the reverse.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from logitless.bench.cases import DIFFERENTIATED, Case
from logitless.bench.child import now_ms
from logitless.bench.inputs import labels_of

CLIP = 0.2


@dataclass(frozen=True)
class Batch:
    """The arrays of a case as tensors; the head is [V, D], as torch stores it."""

    torch: Any
    hidden: Any
    weight: Any
    targets: Any
    labels: Any
    old_logprobs: Any
    advantages: Any
    mask: Any
    softcap: float | None

    def rows(self) -> Any:
        """Hidden states [N, D]."""
        return self.hidden.flatten(0, 1)


class TorchProgram:
    """A peer's loss and gradients of one case, its inputs inside and on the device."""

    def __init__(self, function: Callable[[Batch], Any], case: Case, arrays: dict[str, np.ndarray]) -> None:
        torch = importlib.import_module("torch")
        torch.set_num_threads(_cores())
        self._torch, self._function, self._case = torch, function, case
        self._device = torch.device("cuda" if case.device == "gpu" else "cpu")
        lm_head = arrays["lm_head"] if case.layout == "VD" else np.ascontiguousarray(arrays["lm_head"].T)
        moving = {
            name: torch.from_numpy(array).to(self._device, getattr(torch, case.dtype))
            for name, array in (("hidden", arrays["hidden"]), ("lm_head", lm_head))
        }
        self._leaves = [moving[name].requires_grad_() for name in case.differentiate]

        def put(array: np.ndarray, dtype: Any) -> Any:
            return torch.from_numpy(array).to(self._device, dtype)

        self._batch = Batch(
            torch=torch,
            hidden=moving["hidden"],
            weight=moving["lm_head"],
            targets=put(arrays["targets"], torch.int64),
            labels=put(labels_of(arrays["targets"], arrays["mask"]).reshape(-1), torch.int64),
            old_logprobs=put(arrays["old_logprobs"], torch.float32),
            advantages=put(arrays["advantages"], torch.float32),
            mask=put(arrays["mask"], torch.float32),
            softcap=case.softcap,
        )
        self._warm_up()

    def _warm_up(self) -> None:
        """Runs a few tokens: what is imported and compiled on a first run is no memory of the loss."""
        batch, rows, positions, vocab = self._batch, 1, min(4, self._batch.targets.shape[1]), 64
        leaves = [batch.hidden[:rows, :positions].detach(), batch.weight[:vocab].detach()]
        moving = [
            leaf.requires_grad_()
            for leaf, name in zip(leaves, DIFFERENTIATED, strict=True)
            if name in self._case.differentiate
        ]
        targets = batch.targets[:rows, :positions] % min(vocab, batch.weight.shape[0])
        small = Batch(
            torch=batch.torch,
            hidden=leaves[0],
            weight=leaves[1],
            targets=targets,
            labels=targets.flatten(),
            old_logprobs=batch.old_logprobs[:rows, :positions],
            advantages=batch.advantages[:rows],
            mask=batch.mask[:rows, :positions],
            softcap=batch.softcap,
        )
        self._torch.autograd.grad(self._function(small), moving)
        if "torch._dynamo" in sys.modules:
            # Else a loss that torch compiles would run at the case's sizes as code for any size.
            self._torch.compiler.reset()

    def run(self) -> tuple[Any, tuple[Any, ...]]:
        """Runs to the end; gives what `loss` and `values` read."""
        loss = self._function(self._batch)
        gradients = self._torch.autograd.grad(loss, self._leaves)
        if self._device.type == "cuda":
            self._torch.cuda.synchronize()
        return loss.detach(), gradients

    def step(self) -> float:
        """Milliseconds of one run."""
        if self._device.type == "cpu":
            start = now_ms()
            self.run()
            return now_ms() - start
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._torch.autograd.grad(self._function(self._batch), self._leaves)
        end.record()
        self._torch.cuda.synchronize()
        return start.elapsed_time(end)

    def loss(self, result: tuple[Any, tuple[Any, ...]]) -> float:
        """The loss alone; copies nothing large."""
        return float(result[0])

    def values(self, result: tuple[Any, tuple[Any, ...]]) -> dict[str, np.ndarray]:
        """`loss`, `d_hidden` and `d_lm_head` as far as they are wanted, in the case's dtype and layout."""
        # JAX's own dependency, which gives numpy its bfloat16.
        import ml_dtypes

        loss, gradients = result
        dtype = np.dtype(getattr(ml_dtypes, self._case.dtype, self._case.dtype))
        values = {"loss": loss.float().cpu().numpy()}
        for name, gradient in zip(self._case.differentiate, gradients, strict=True):
            # numpy reads no bfloat16 of torch; through float32 no digit is lost.
            value = gradient.float().cpu().numpy().astype(dtype, copy=False)
            turned = name == "lm_head" and self._case.layout == "DV"
            values[f"d_{name}"] = value.T if turned else value
        return values

    def device_peak_bytes(self) -> int | None:
        """The most that was allocated on a GPU, or None on a CPU."""
        return None if self._device.type == "cpu" else int(self._torch.cuda.max_memory_allocated())


def grpo(batch: Batch) -> Any:
    """Plain torch with all logits: what a training script without a fused loss runs."""
    torch = batch.torch
    logprobs = torch.log_softmax(_logits(batch), -1).gather(-1, batch.targets[..., None])[..., 0]
    ratio = torch.exp(logprobs - batch.old_logprobs)
    advantage = batch.advantages[:, None]
    token_loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return ((token_loss * batch.mask).sum(1) / batch.mask.sum(1).clamp(min=1.0)).mean()


def cross_entropy(batch: Batch) -> Any:
    return batch.torch.nn.functional.cross_entropy(_logits(batch).flatten(0, 1), batch.labels)


def _logits(batch: Batch) -> Any:
    logits = batch.torch.nn.functional.linear(batch.hidden, batch.weight).float()
    return logits if batch.softcap is None else batch.softcap * batch.torch.tanh(logits / batch.softcap)


def chunked_cross_entropy(batch: Batch) -> Any:
    """What torch has itself, with the chunks that it chooses itself."""
    options = batch.torch.nn.LinearCrossEntropyOptions()
    function = batch.torch.nn.functional.linear_cross_entropy
    return function(batch.rows(), batch.weight, batch.labels, options=options)


def liger_grpo(batch: Batch) -> Any:
    return _liger_grpo(batch, compiled=False)


def liger_compiled_grpo(batch: Batch) -> Any:
    """With `compiled=True`, its default: needs a C++ compiler on a CPU."""
    return _liger_grpo(batch, compiled=True)


def _liger_grpo(batch: Batch, *, compiled: bool) -> Any:
    chunked_loss = importlib.import_module("liger_kernel.chunked_loss")
    loss = chunked_loss.LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=compiled, use_ref_model=False, epsilon_low=CLIP, epsilon_high=CLIP, loss_type="grpo"
    )
    value, _ = loss(
        batch.hidden,
        batch.weight,
        batch.targets,
        batch.mask,
        batch.advantages,
        old_per_token_logps=batch.old_logprobs,
    )
    return value


def liger_cross_entropy(batch: Batch) -> Any:
    transformers = importlib.import_module("liger_kernel.transformers")
    loss = transformers.LigerFusedLinearCrossEntropyLoss(softcap=batch.softcap)
    return loss(batch.weight, batch.rows(), batch.labels)


def cut_cross_entropy(batch: Batch) -> Any:
    """Apple's kernels, with the gradient filter that they have on by default."""
    module = importlib.import_module("cut_cross_entropy")
    return module.linear_cross_entropy(batch.rows(), batch.weight, batch.labels, softcap=batch.softcap)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
