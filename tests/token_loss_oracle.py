"""What `linear_token_loss` is judged by: token losses with their slopes by hand, numpy in long double, plain jnp."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from logitless.ops.api import linear_token_loss
from logitless.ops.types import Layout
from problems import Problem, in_layout


class Outcome(NamedTuple):
    """Loss, log-probabilities, and the gradients of `scale * loss`."""

    loss: Any
    logprobs: Any
    d_hidden: Any
    d_lm_head: Any
    d_bias: Any


def weighted_nll(logprob, weight):
    return -weight * logprob


def clipped(logprob, old_logprob, advantage, total):
    ratio = jnp.exp(logprob - old_logprob)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage) / total


def k3(logprob, ref_logprob, weight):
    delta = ref_logprob - logprob
    return weight * (jnp.expm1(delta) - delta)


def sapo(logprob, old_logprob, advantage):
    tau = jnp.where(advantage > 0, 1.0, 1.05).astype(logprob.dtype)
    return -4 / tau * jax.nn.sigmoid(tau * (jnp.exp(logprob - old_logprob) - 1)) * advantage


def _weighted_nll(x, weight):
    return -weight * x, -weight


def _clipped(x, old, advantage, total):
    ratio = np.exp(x - old)
    bounded = np.where(ratio < 0.8, 0.8, np.where(ratio > 1.2, 1.2, ratio))
    clips = np.where(advantage > 0, ratio > 1.2, ratio < 0.8)
    loss = -np.minimum(ratio * advantage, bounded * advantage) / total
    return loss, np.where(clips, 0.0, -ratio * advantage / total)


def _k3(x, ref, weight):
    ratio = np.exp(ref - x)
    return weight * (ratio - (ref - x) - 1), weight * (1 - ratio)


def _sapo(x, old, advantage):
    tau, ratio = np.where(advantage > 0, 1.0, np.float32(1.05)), np.exp(x - old)
    s = 1 / (1 + np.exp(-tau * (ratio - 1)))
    return -4 / tau * s * advantage, -4 * s * (1 - s) * ratio * advantage


class TokenLoss(NamedTuple):
    """A loss of one token, its value and slope by hand, and arguments that keep clear of its kinks."""

    of: Callable[..., Any]
    by_hand: Callable[..., tuple[Any, Any]]
    arguments: Callable[[Any, np.random.Generator], tuple]


def _near(x: Any, rng: np.random.Generator) -> Any:
    # Ratios 1.35, 0.61, 1.65, 0.67 and 1.11: none close to a bound of 0.8 or 1.2, nor to 1, where slopes cancel.
    return x - rng.choice([0.3, -0.5, 0.5, -0.4, 0.1], x.shape)


LOSSES = {
    "weighted nll": TokenLoss(weighted_nll, _weighted_nll, lambda x, rng: (rng.normal(size=x.shape),)),
    "clipped": TokenLoss(clipped, _clipped, lambda x, rng: (_near(x, rng), rng.normal(size=x.shape), 7.0)),
    "k3": TokenLoss(k3, _k3, lambda x, rng: (_near(x, rng), 0.3)),
    "sapo": TokenLoss(sapo, _sapo, lambda x, rng: (_near(x, rng), rng.normal(size=x.shape))),
}


def wide(x: Any) -> np.ndarray:
    """Long double: 64 bits of mantissa on x86, float64 elsewhere."""
    return np.asarray(np.asarray(x).astype(np.float64), np.longdouble)


class Softmax(NamedTuple):
    """What numpy knows of every token, in long double."""

    logprobs: np.ndarray
    p: np.ndarray
    missing: np.ndarray
    d_x: np.ndarray


def softmax(problem: Problem, options: dict) -> Softmax:
    """Log-probability, softmax, `1 - p` of the target, and d logit / d (h W + b)."""
    temperature, softcap, scale = (options.get(key) for key in ("temperature", "softcap", "logit_scale"))
    # The op holds its scalars in float32 where 64 bits are off.
    number = np.float64 if jax.config.read("jax_enable_x64") else np.float32
    x = wide(problem.hidden) @ wide(problem.lm_head).T
    if options.get("bias"):
        x = x + wide(problem.bias)
    if options.get("logits_dtype"):
        x = wide(x.astype(np.float64).astype(jnp.dtype(options["logits_dtype"])))
    d_x = np.ones_like(x)
    if scale is not None:
        x, d_x = x * number(scale), d_x * number(scale)
    if softcap is not None:
        tanh = np.tanh(x / number(softcap))
        x, d_x = np.where(x == -np.inf, -np.inf, number(softcap) * tanh), d_x * (1 - tanh**2)
    if temperature is not None:
        x, d_x = x / number(temperature), d_x / number(temperature)
    rows, targets = np.arange(x.shape[0]), np.asarray(problem.targets)
    rest = x.copy()
    rest[rows, targets] = -np.inf
    with np.errstate(divide="ignore"):
        others = np.logaddexp.reduce(rest, axis=1)
        logprobs = -np.logaddexp(0, others - x[rows, targets])
    lse = np.logaddexp.reduce(x, axis=1)
    return Softmax(logprobs, np.exp(x - lse[:, None]), -np.expm1(logprobs), d_x)


def by_hand(
    problem: Problem, loss: TokenLoss, arguments: tuple, scale: float, layout: Layout, options: dict
) -> tuple[Outcome, float]:
    """The outcome in long double, every derivative written out, and what the loss adds up, signs aside."""
    soft = softmax(problem, options)
    rows, targets = np.arange(soft.p.shape[0]), np.asarray(problem.targets)
    values, slopes = loss.by_hand(soft.logprobs, *(wide(x) for x in arguments))
    counts = np.asarray(problem.mask) if options.get("mask") else np.ones(rows.shape, bool)
    values, slopes = np.where(counts, values, 0.0), np.where(counts, slopes, 0.0)
    # A rounding of a log-probability reaches the loss times the slope.
    added = np.abs(values).sum() + np.abs(slopes * np.where(counts, soft.logprobs, 0.0)).sum()
    slopes = wide(scale) * slopes
    d_z = -soft.p * slopes[:, None]
    d_z[rows, targets] = soft.missing * slopes
    d_z = np.where(soft.p == 0, 0.0, d_z * soft.d_x)
    d_lm_head = d_z.T @ wide(problem.hidden)
    outcome = Outcome(
        values.sum(),
        np.where(counts, soft.logprobs, 0.0),
        d_z @ wide(problem.lm_head),
        d_lm_head if layout == "VD" else d_lm_head.T,
        d_z.sum(0) if options.get("bias") else np.zeros(soft.p.shape[1]),
    )
    with jax.enable_x64(True):
        return Outcome(*(jnp.asarray(np.asarray(x, np.float64)) for x in outcome)), float(added)


def plain(problem: Problem, loss: TokenLoss, arguments: tuple, scale: Any, layout: Layout, options: dict) -> Outcome:
    """The outcome in plain jnp that holds all logits, in the dtypes of the problem, differentiated by JAX."""
    options = dict(options)
    takes_bias, takes_mask = options.pop("bias", False), options.pop("mask", False)
    dtype = jnp.float64 if problem.hidden.dtype == jnp.float64 else jnp.float32

    def total(hidden, lm_head, bias):
        equation = "nd,dv->nv" if layout == "DV" else "nd,vd->nv"
        x = jnp.einsum(equation, hidden, lm_head, precision="highest", preferred_element_type=dtype)
        x = x + bias.astype(dtype)[None] if takes_bias else x
        if "logits_dtype" in options:
            x = x.astype(options["logits_dtype"]).astype(dtype)
        gone = x == -jnp.inf
        x = jnp.where(gone, 0.0, x) * options.get("logit_scale", 1.0)
        if "softcap" in options:
            x = options["softcap"] * jnp.tanh(x / options["softcap"])
        x = jnp.where(gone, -jnp.inf, x / options.get("temperature", 1.0))
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(x), problem.targets[:, None], axis=1)[:, 0]
        losses = jax.vmap(loss.of, (0, *(0 if jnp.ndim(a) else None for a in arguments)))(logprobs, *arguments)
        counts = problem.mask if takes_mask else jnp.ones(losses.shape, bool)
        value = jnp.where(counts, losses, 0.0).sum()
        return scale * value, (value, jnp.where(counts, logprobs, 0.0))

    inputs = (problem.hidden, in_layout(problem.lm_head, layout), problem.bias)
    gradients, (value, logprobs) = jax.grad(total, (0, 1, 2), has_aux=True)(*inputs)
    return Outcome(value, logprobs, *gradients)


SMALL_BLOCKS = {"block_n": 8, "block_v": 50}


def assert_close(x, y, **kwargs):
    """Float32 to a few roundings."""
    np.testing.assert_allclose(np.asarray(x), np.asarray(y), **{"rtol": 2e-5, "atol": 2e-6, **kwargs})


def loss_of(problem: Problem, implementation: str, weights: Any = 1.0, token_loss=weighted_nll, **options):
    """`(hidden, lm_head)` to the loss of a problem of one argument."""
    run = {"layout": "VD", "implementation": implementation, "block_sizes": SMALL_BLOCKS, **options}
    return lambda h, w: linear_token_loss(h, w, problem.targets, token_loss, (weights,), **run)[0]
