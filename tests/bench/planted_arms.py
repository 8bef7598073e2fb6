"""Arms that a bench must refuse or survive, given to it as `planted_arms:name`."""

import os
import time

import jax
import numpy as np

from logitless.bench.oracle import plain_loss


def right(*arrays, layout):
    return plain_loss(*arrays, layout=layout)[0]


def wrong_sign(hidden, lm_head, *rest, layout):
    """The right loss, with d_lm_head of the wrong sign."""

    @jax.custom_vjp
    def turned(lm_head):
        return lm_head

    turned.defvjp(lambda lm_head: (lm_head, None), lambda _, grad: (-grad,))
    return plain_loss(hidden, turned(lm_head), *rest, layout=layout)[0]


def wrong_loss(*arrays, layout):
    return plain_loss(*arrays, layout=layout)[0] + 0.01


def dies(*arrays, layout):
    os._exit(7)


def hangs(*arrays, layout):
    time.sleep(600)


def raises(*arrays, layout):
    raise RuntimeError("this arm is broken")


def numpy_grpo(hidden, lm_head, targets, old_logprobs, advantages, mask, *, layout, differentiate):
    """GRPO and its gradients by hand, as a framework that is not JAX would give them."""
    counts = mask / np.maximum(mask.sum(1, keepdims=True), 1) / len(mask)
    probs, rows, logprobs = _softmax(hidden, lm_head, targets, layout)
    ratio = np.exp(logprobs - old_logprobs.reshape(-1))
    advantage = np.repeat(advantages, mask.shape[1])
    clipped = np.clip(ratio, 0.8, 1.2) * advantage
    loss = -(np.minimum(ratio * advantage, clipped) * counts.reshape(-1)).sum()
    moves = (ratio * advantage <= clipped) * ratio * advantage
    d_logprobs = -moves * counts.reshape(-1)
    return loss, _gradients(probs, rows, d_logprobs, hidden, lm_head, targets, layout, differentiate)


def numpy_cross_entropy(hidden, lm_head, labels, *, layout, differentiate):
    counts = (labels != -100).reshape(-1)
    targets = np.maximum(labels, 0)
    probs, rows, logprobs = _softmax(hidden, lm_head, targets, layout)
    loss = -(logprobs * counts).sum() / counts.sum()
    d_logprobs = -1.0 * counts / counts.sum()
    return loss, _gradients(probs, rows, d_logprobs, hidden, lm_head, targets, layout, differentiate)


def numpy_wrong_sign(*arrays, layout, differentiate):
    loss, gradients = numpy_grpo(*arrays, layout=layout, differentiate=differentiate)
    return loss, gradients | {"lm_head": -gradients["lm_head"]}


def numpy_wrong_loss(*arrays, layout, differentiate):
    loss, gradients = numpy_cross_entropy(*arrays, layout=layout, differentiate=differentiate)
    return loss + 0.01, gradients


def numpy_no_head_gradient(*arrays, layout, differentiate):
    loss, gradients = numpy_grpo(*arrays, layout=layout, differentiate=differentiate)
    return loss, {"hidden": gradients["hidden"]}


def _softmax(hidden, lm_head, targets, layout):
    rows = hidden.reshape(-1, hidden.shape[-1]).astype(np.float64)
    logits = rows @ (lm_head.T if layout == "VD" else lm_head)
    logits -= logits.max(1, keepdims=True)
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return probs, rows, np.log(probs[np.arange(len(rows)), targets.reshape(-1)])


def _gradients(probs, rows, d_logprobs, hidden, lm_head, targets, layout, differentiate):
    d_logits = -d_logprobs[:, None] * probs
    d_logits[np.arange(len(rows)), targets.reshape(-1)] += d_logprobs
    d_lm_head = d_logits.T @ rows
    gradients = {
        "hidden": (d_logits @ (lm_head if layout == "VD" else lm_head.T)).reshape(hidden.shape),
        "lm_head": d_lm_head if layout == "VD" else d_lm_head.T,
    }
    return {name: gradients[name].astype(hidden.dtype) for name in differentiate}
