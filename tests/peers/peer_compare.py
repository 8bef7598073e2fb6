"""Ours and a peer's on the same inputs, and how far apart they are."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from peer_cases import PAIRS, Case
from peer_inputs import B, make_batch, make_labels, make_pairs, make_teacher
from torch_peers import (
    Result,
    distillation,
    liger_policy,
    liger_preference,
    torch_cross_entropy,
    trl_policy,
    trl_preference,
)
from torch_peers import trl_supervised as trl_sft

from logitless import (
    linear_cross_entropy,
    linear_dft_loss,
    linear_distillation_loss,
    linear_logprobs,
    linear_policy_loss,
)
from logitless.losses.preference import (
    cpo_loss,
    dpo_loss,
    ipo_loss,
    kto_loss,
    orpo_loss,
    sequence_logprobs,
    simpo_loss,
)

RTOL = 1e-5
"""Of the loss, and of each gradient's largest element. float32 rounds at 6e-8, the ratio passes on the rounding of a
log-probability of size 8, and sums of 31 tokens cancel: 3e-6 is the largest gap seen."""


@functools.cache
def ours_of(index: int) -> Result:
    """Loss and gradients of ours for the case of `PAIRS[index]`."""
    case = PAIRS[index][0]
    function, hidden, lm_head = {"policy": _policy, "supervised": _supervised, "preference": _preference}[case.family](
        case
    )
    loss, (d_hidden, d_lm_head) = jax.jit(jax.value_and_grad(function, (0, 1)))(hidden, lm_head)
    return Result(float(loss), np.asarray(d_hidden), np.asarray(d_lm_head))


def theirs_of(case: Case, peer: str) -> Result:
    """Loss and gradients of the peer."""
    options = dict(case.theirs[peer])
    if case.family == "policy":
        batch = make_batch(case.inputs, options.get("temperature", 1.0))
        return {"TRL": trl_policy, "Liger": liger_policy}[peer](batch, options)
    if case.kind == "distillation":
        return distillation(peer, *make_labels(case.inputs), options)
    if case.family == "supervised":
        inputs = make_labels(case.inputs)
        if peer == "TRL":
            return trl_sft(*inputs, options)
        return torch_cross_entropy(*inputs, options, linear="linear" in peer)
    run = {"TRL": trl_preference, "Liger": liger_preference}[peer]
    return run(make_pairs(case.inputs), options.pop("trainer"), options)


def gradient_gap(ours: Result, theirs: Result) -> float:
    """The largest difference of either gradient, relative to the largest element of theirs; NaN where one has NaN."""
    gaps = []
    for a, b in ((ours.d_hidden, theirs.d_hidden), (ours.d_lm_head, theirs.d_lm_head)):
        assert a.shape == b.shape, f"{a.shape} against {b.shape}"
        with np.errstate(invalid="ignore"):
            gaps.append(np.abs(a - b).max() / (np.abs(b).max() or 1.0))
    return float(max(gaps, key=lambda gap: np.inf if np.isnan(gap) else gap))


def _policy(case: Case) -> tuple[Any, np.ndarray, np.ndarray]:
    options = dict(case.ours)
    batch = make_batch(case.inputs, options.get("temperature", 1.0))
    if any("rollout" in theirs for theirs in case.theirs.values()):
        options["rollout_logprobs"] = batch.rollout
    if "kl" in options:
        options["ref_logprobs"] = batch.ref

    def loss(hidden, lm_head):
        return linear_policy_loss(
            hidden, lm_head, batch.targets, batch.old, batch.advantages, batch.mask, **options
        ).loss

    return loss, batch.hidden, batch.lm_head


def _supervised(case: Case) -> tuple[Any, np.ndarray, np.ndarray]:
    hidden, lm_head, labels = make_labels(case.inputs)
    options = dict(case.ours)
    if "weights" in options:
        # Theirs are of classes.
        options["weights"] = options["weights"][np.maximum(labels, 0)]
    if case.kind == "distillation":
        teacher = make_teacher(hidden, lm_head)
        return lambda h, w: linear_distillation_loss(h, w, *teacher, labels, **options), hidden, lm_head
    function = {"cross_entropy": linear_cross_entropy, "dft": linear_dft_loss}[case.kind]
    return lambda hidden, lm_head: function(hidden, lm_head, labels, **options), hidden, lm_head


def _preference(case: Case) -> tuple[Any, np.ndarray, np.ndarray]:
    pairs = make_pairs(case.inputs)
    mean = case.kind in ("ipo", "simpo", "orpo")
    mask = jnp.asarray(pairs.mask)

    def loss(hidden, lm_head):
        logprobs = linear_logprobs(hidden, lm_head, pairs.targets, mask=pairs.mask)
        ref = linear_logprobs(pairs.ref_hidden, pairs.lm_head, pairs.targets, mask=pairs.mask)
        both, ref_both = (sequence_logprobs(x, mask, mean=mean) for x in (logprobs, ref))
        chosen, rejected, ref_chosen, ref_rejected = both[:B], both[B:], ref_both[:B], ref_both[B:]
        if case.kind == "kto":
            return kto_loss(both, ref_both, pairs.desirable, **case.ours).loss
        if case.kind in ("dpo", "ipo"):
            function = {"dpo": dpo_loss, "ipo": ipo_loss}[case.kind]
            return function(chosen, rejected, ref_chosen, ref_rejected, **case.ours).loss
        if case.kind == "simpo":
            return simpo_loss(chosen, rejected, **case.ours).loss
        nll = -jnp.sum(logprobs[:B]) / jnp.sum(mask[:B]).astype(logprobs.dtype)
        return {"cpo": cpo_loss, "orpo": orpo_loss}[case.kind](chosen, rejected, nll, **case.ours).loss

    return loss, pairs.hidden, pairs.lm_head
