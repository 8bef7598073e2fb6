"""What the door hands to every implementation: plain data, no arithmetic."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
from jaxtyping import Array, Float

if TYPE_CHECKING:
    Layout = Literal["DV", "VD"]
    OutputName = Literal["logprobs", "lse", "entropy", "mean_logits"]
else:
    # The door refuses an unknown name, and names the nearest one.
    Layout = OutputName = str
PrecisionLike = jax.lax.PrecisionLike
OUTPUT_NAMES: tuple[OutputName, ...] = ("logprobs", "lse", "entropy", "mean_logits")


class TokenStats(NamedTuple):
    """Per-token numbers of one softmax, each of the shape of `targets`; None where not asked for.

    Who asks for a statistic need not tell a type checker that it is there: hence `Any` beside the array.

    Attributes:
        logprobs: log-probability of the target, in nats.
        lse: log-sum-exp of the logits after softcap and temperature, in nats.
        entropy: entropy of the softmax, in nats.
        mean_logits: mean of the logits over the true vocabulary.
    """

    logprobs: Float[Array, "..."] | Any = None
    lse: Float[Array, "..."] | Any = None
    entropy: Float[Array, "..."] | Any = None
    mean_logits: Float[Array, "..."] | Any = None


class LogitScalars(NamedTuple):
    """`z = softcap tanh(x logit_scale / softcap) / temperature`; None leaves the step out of the program."""

    temperature: Float[Array, ""] | None = None
    softcap: Float[Array, ""] | None = None
    logit_scale: Float[Array, ""] | None = None


@dataclass(frozen=True)
class HeadOptions:
    """The static choices of a call: hashable, known when the program is traced.

    Attributes:
        layout: `"DV"` for a head `[D, V]`, `"VD"` for `[V, D]`.
        outputs: the fields of `TokenStats` to compute.
        logits_dtype: dtype that the products are rounded to before anything else, or None.
        precision: of the products, as `jax.lax.dot_general` takes it.
        block_n: tokens of a block, or None for the implementation's own rule.
        block_v: vocabulary columns of a block, or None for the implementation's own rule.
        block_d: hidden columns of a block, or None for the implementation's own rule.
        block_bytes: most bytes of float32 logits at one time, for the rule to choose the blocks by; None for its own.
        platform: that the program is for, as JAX names it: what the rules of blocks go by.
        device_kind: of that platform, as JAX names it.
        interpret: how to simulate a TPU kernel in place of compiling it; None compiles.
        sharding: a `logitless.ops.head_sharding.HeadSharding`, or None on one device.
        padded: the bias marks columns by -inf that are no columns of the vocabulary: no mean counts them.
        wide_gradients: gradients come back in the dtype of the sums, for a caller that adds to them.
    """

    layout: Layout = "DV"
    outputs: tuple[OutputName, ...] = ("logprobs",)
    logits_dtype: str | None = None
    precision: PrecisionLike = None
    block_n: int | None = None
    block_v: int | None = None
    block_d: int | None = None
    block_bytes: int | None = None
    platform: str = "cpu"
    device_kind: str = "cpu"
    interpret: Any = None
    sharding: Any = None
    padded: bool = False
    wide_gradients: bool = False


BLOCK_SIZES = ("block_n", "block_v", "block_d", "block_bytes")
"""What `block_sizes` may hold."""
LOGIT_BYTES = 4
"""Bytes of a logit as `block_bytes` counts them: float32."""
