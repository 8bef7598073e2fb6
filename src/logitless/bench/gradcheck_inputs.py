"""The inputs of a gradcheck case, and how hard they are."""

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from logitless.losses.policy_presets import grpo_loss

if TYPE_CHECKING:
    from logitless.bench.gradcheck_cases import ResolvedCase

SURE = 0.99
LEAST_LOGIT, LEAST_COTANGENT = 30.0, 0.1
"""What `peaked` asks of inputs: a logit so large, a token so sure of its target, and no smaller cotangent."""


@dataclass(frozen=True)
class InputFacts:
    """How hard the inputs are: sure tokens, large logits and large cotangents are where mistakes show.

    Attributes:
        counted: tokens that the mask counts; the other facts are of these.
        largest_logit: largest |z|, z the logits after softcap and temperature.
        sure_tokens: tokens whose target has p > 0.99.
        moving_tokens: tokens whose log-probability has a cotangent that is not 0.
        least_cotangent: smallest magnitude of those cotangents.
        largest_cotangent: largest.
    """

    counted: int
    largest_logit: float
    sure_tokens: int
    moving_tokens: int
    least_cotangent: float
    largest_cotangent: float

    def __str__(self) -> str:
        return (
            f"inputs: largest |z| {self.largest_logit:.1f}; p > {SURE} on {self.sure_tokens} of {self.counted} tokens; "
            f"cotangents of {self.moving_tokens} log-probabilities from {self.least_cotangent:.2g} to "
            f"{self.largest_cotangent:.2g}"
        )

    def record(self) -> dict[str, Any]:
        return {f"inputs/{name}": value for name, value in asdict(self).items()}

    def why_not_peaked(self) -> str | None:
        """What they lack, and what would help; None where nothing."""
        wrong = {
            f"the largest |z| is {self.largest_logit:.3g} and must be {LEAST_LOGIT:g} or more: raise peak_logits": not (
                self.largest_logit >= LEAST_LOGIT
            ),
            f"no token has p > {SURE}: raise peak_logits, or give more tokens": self.sure_tokens == 0,
            f"the smallest cotangent is {self.least_cotangent:.3g} and must be {LEAST_COTANGENT:g} or more: raise "
            "advantages, or give fewer tokens": not self.least_cotangent >= LEAST_COTANGENT,
        }
        return "; ".join(message for message, is_wrong in wrong.items() if is_wrong) or None


def facts_of(resolved: "ResolvedCase", arrays: Mapping[str, jax.Array]) -> InputFacts:
    """The facts, of logits in plain jnp in float32."""
    case, mask = resolved.case, arrays["mask"]

    @jax.jit
    def run(arrays):
        logprobs = resolved.call(arrays, "reference").astype(jnp.float32)
        kl = {"kl_coef": case.kl_coef, "ref_logprobs": arrays.get("ref_logprobs")}

        def loss(logprobs):
            return grpo_loss(logprobs, arrays["old_logprobs"], arrays["advantages"], mask, **kl).loss

        sizes = jnp.abs(_logits(resolved, arrays)).max(axis=-1)
        return jnp.where(mask, sizes, 0).max(), logprobs, jnp.abs(jax.grad(loss)(logprobs))

    largest, logprobs, cotangents = jax.device_get(run(dict(arrays)))
    counts = np.asarray(mask)
    moving = cotangents[counts & (cotangents > 0)]
    return InputFacts(
        counted=int(counts.sum()),
        largest_logit=float(largest),
        sure_tokens=int((np.exp(logprobs[counts]) > SURE).sum()),
        moving_tokens=moving.size,
        least_cotangent=float(moving.min(initial=math.inf)) if moving.size else 0.0,
        largest_cotangent=float(moving.max(initial=0.0)),
    )


def _logits(resolved: "ResolvedCase", arrays: Mapping[str, jax.Array]) -> jax.Array:
    case = resolved.case
    if case.level == "logits":
        logits = arrays["logits"].astype(jnp.float32)
    else:
        head = arrays["lm_head"] if case.layout == "DV" else arrays["lm_head"].T
        highest = jax.lax.Precision.HIGHEST
        logits = jnp.matmul(arrays["hidden"], head, precision=highest, preferred_element_type=jnp.float32)
        if case.bias:
            logits += arrays["bias"].astype(jnp.float32)[None, None, :]
    logits *= resolved.logit_scale
    if resolved.softcap is not None:
        logits = resolved.softcap * jnp.tanh(logits / resolved.softcap)
    return logits / case.temperature


def reorder(resolved: "ResolvedCase", arrays: Mapping[str, jax.Array], orders: int) -> Iterator[dict[str, jax.Array]]:
    """The same problem in other orders of what plain jnp sums: the hidden size, at the logits level the vocabulary."""
    case = resolved.case
    summed = {"logits": -1} if case.level == "logits" else {"hidden": -1, "lm_head": case.layout.index("D")}
    for seed in range(1, orders):
        size = resolved.vocab_size if case.level == "logits" else resolved.hidden_size
        order = np.random.default_rng(seed).permutation(size)
        turned = {name: jnp.take(arrays[name], order, axis=axis) for name, axis in summed.items()}
        if case.level == "logits":
            turned["targets"] = jnp.asarray(np.argsort(order).astype(np.int32))[arrays["targets"]]
        yield dict(arrays) | turned


def make_arrays(resolved: "ResolvedCase", seed: int) -> dict[str, jax.Array]:
    """Inputs on which mistakes show: a peaked softmax, a mask, advantages of both signs, ratios in and out of the clip.

    Half of the tokens have a scaled copy of their hidden state in the head: every other one of them in the row of its
    target (p > 0.99), the rest in another row (the target is all but impossible). Ratios keep away from the clip
    bounds, for a rounding error that moves one across a bound would change the gradient by all of it.
    """
    case, shape = resolved.case, resolved.shape
    rng = np.random.default_rng(seed)
    tokens, vocab = case.tokens, resolved.vocab_size
    targets = rng.integers(0, vocab, tokens)
    arrays = {"targets": targets.reshape(shape).astype(np.int32), "mask": rng.random(shape) >= case.mask_fraction}
    peaked = np.arange(0, tokens, 2)
    peak = np.linspace(*case.peak_logits, peaked.size, dtype=np.float32) * (case.temperature / resolved.logit_scale)
    columns = np.where(peaked % 4 == 0, targets[peaked], rng.integers(0, vocab, peaked.size))
    dtype = jnp.dtype(case.dtype)
    floats: dict[str, np.ndarray] = {}
    if case.level == "logits":
        logits = rng.standard_normal((tokens, vocab), dtype=np.float32)
        logits[peaked, columns] = peak
        floats["logits"] = logits.reshape(*shape, vocab)
    else:
        width = resolved.hidden_size
        hidden = rng.standard_normal((tokens, width), dtype=np.float32)
        rows = rng.standard_normal((vocab, width), dtype=np.float32)
        rows /= math.sqrt(width)
        rows[columns] = hidden[peaked] * (peak / np.sum(hidden[peaked] ** 2, axis=1))[:, None]
        floats["hidden"] = hidden.reshape(*shape, width)
        floats["lm_head"] = rows if case.layout == "VD" else np.ascontiguousarray(rows.T)
        if case.bias:
            floats["bias"] = rng.standard_normal(vocab, dtype=np.float32)
    out = {name: jnp.asarray(value) for name, value in arrays.items()}
    out |= {name: jnp.asarray(value.astype(dtype)) for name, value in floats.items()}

    logprobs = np.asarray(jax.jit(functools.partial(resolved.call, implementation="reference"))(out), np.float32)
    steps = rng.choice([-0.35, -0.08, 0.06, 0.3], shape) + rng.uniform(-0.02, 0.02, shape)
    sign = np.where(np.arange(tokens).reshape(shape) % 3 == 0, -1.0, 1.0)
    out["old_logprobs"] = jnp.asarray((logprobs - steps).astype(np.float32))
    out["advantages"] = jnp.asarray((sign * rng.uniform(*case.advantages, shape)).astype(np.float32))
    if case.kl_coef:
        out["ref_logprobs"] = jnp.asarray((logprobs + 0.5 * rng.standard_normal(shape)).astype(np.float32))
    return out
