"""Losses that are local to the token: what `linear_token_loss` needs to know of them, and which ones they are.

A loss is a weighted sum of token losses, sum_t weight_t l(logprob_t, ...), and local where neither the weights nor l
read another token's log-probability. Its gradient can then be made in one pass over the head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from logitless._arrays import FloatArray
from logitless.losses.aggregate import aggregate
from logitless.losses.policy import policy_loss
from logitless.losses.policy_options import is_off
from logitless.losses.sequences import find_sequences

_ARRAYS = ("old_logprobs", "advantages", "ref_logprobs", "rollout_logprobs")
_OF_THE_BATCH = ("aggregation", "total", "max_completion_length", "segment_ids", "entropy")


@jax.custom_jvp
def with_slope_of(value: Float[Array, ""], carrier: Float[Array, ""]) -> Float[Array, ""]:
    """`value` itself, with the gradient of `value` and that of `carrier` added up."""
    return value


@with_slope_of.defjvp
def _with_slope_of_jvp(primals, tangents):
    return primals[0], tangents[0] + tangents[1].astype(tangents[0].dtype)


def what_is_not_local(options: Mapping[str, Any]) -> str | None:
    """The option of a policy loss that lets one token's gradient depend on another's log-probability, or None."""
    for name, local in (("ratio_level", ("token",)), ("surrogate", ("clip", "cispo", "sapo", "none"))):
        if options[name] not in local:
            return f"{name}={options[name]!r}"
    if options["rollout_logprobs"] is not None and options["rollout_level"] != "token":
        return f"rollout_level={options['rollout_level']!r}"
    # Both read the entropy, which is no function of the log-probability.
    if not is_off(options["entropy_coef"]):
        return f"entropy_coef={options['entropy_coef']!r}"
    if options["top_entropy_quantile"] is not None:
        return f"top_entropy_quantile={options['top_entropy_quantile']!r}"
    return None


def token_weights(counts: Bool[Array, "B T"], options: Mapping[str, Any], dtype: np.dtype) -> Float[Array, "B T"]:
    """The weight that the aggregation gives to the loss of each token."""
    shape = (counts.shape[0], counts.shape[1])
    sequences = find_sequences(shape, options["segment_ids"], dtype)
    more = {name: options[name] for name in ("total", "max_completion_length")}
    # An aggregation is linear in the token losses: its gradient is its weights.
    return jax.grad(lambda losses: aggregate(losses, counts, sequences, options["aggregation"], **more))(
        jnp.zeros(shape, dtype)
    )


@dataclass(frozen=True)
class PolicyToken:
    """The policy loss of one token, as `linear_token_loss` calls it: `(logprob, weight, *those of arguments)`.

    Args:
        arguments: names of what comes per token or may be traced.
        options: the other options of `policy_loss`, by name: hashable, so that equal losses share a program.
    """

    arguments: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]

    def __call__(self, logprob: Array, weight: Array, *values: Array) -> Array:
        """The weighed loss of one token: a batch of one sequence of one token."""
        given = dict(zip(self.arguments, values, strict=True))
        rows = {name: x.reshape(1, 1) if name in _ARRAYS else x for name, x in given.items()}
        out = policy_loss(
            logprob.reshape(1, 1),
            rows.pop("old_logprobs", None),
            rows.pop("advantages"),
            jnp.ones((1, 1), bool),
            aggregation="sequence_sum",
            **rows,
            **dict(self.options),
        )
        return weight * out.loss


def policy_token(
    counts: Bool[Array, "B T"],
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    options: Mapping[str, Any],
    dtype: np.dtype,
) -> tuple[PolicyToken, tuple[Array, ...]]:
    """The loss of a token, and its arguments: the weight first, then all that may differ from call to call."""
    spread = jnp.asarray(advantages)
    spread = jnp.broadcast_to(spread[:, None] if spread.ndim == 1 else spread, counts.shape)
    arrays = {"old_logprobs": old_logprobs, "advantages": spread}
    rest = {name: value for name, value in options.items() if name not in _OF_THE_BATCH}
    arrays |= {name: value for name, value in rest.items() if isinstance(value, jax.Array | np.ndarray)}
    arrays = {name: jnp.asarray(value) for name, value in arrays.items() if value is not None}
    static = tuple((name, value) for name, value in rest.items() if name not in arrays)
    return PolicyToken(tuple(arrays), static), (token_weights(counts, options, dtype), *arrays.values())


def nll_of_token(logprob: Array, weight: Array) -> Array:
    """Cross-entropy of one token."""
    return -weight * logprob


def dft_of_token(logprob: Array, weight: Array) -> Array:
    """DFT of one token; a label without probability weighs nothing."""
    return jnp.where(logprob == -jnp.inf, 0.0, -weight * jnp.exp(jax.lax.stop_gradient(logprob)) * logprob)
