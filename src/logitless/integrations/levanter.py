"""Levanter: an `implementation=` for its fused cross-entropy, and its training losses by it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from logitless.integrations.versions import require
from logitless.ops.api import linear_token_stats
from logitless.ops.types import PrecisionLike

TRIED = ("0.2.227.dev40316220070",)
"""Versions of marin-levanter that the tests run."""

LevanterImplementation = Callable[..., tuple[jax.Array, jax.Array]]


def fused_cross_entropy(
    *,
    implementation: str = "auto",
    block_sizes: Mapping[str, int] | None = None,
    logits_dtype: str | None = None,
) -> LevanterImplementation:
    """A callable for `implementation=` of Levanter's fused cross-entropy. It imports nothing of Levanter.

    Equal to
        z = softcap * tanh(x @ w / softcap); lse = logsumexp(z)
        lse - z[labels], lse

    Levanter adds its z-loss, weights and reduction to these two. A token whose weight is 0 costs nothing in the
    backward pass. Give the callable alone, not within a list: where a list has a second entry, Levanter turns to it
    when this one refuses an option.

    Args:
        implementation: as `linear_token_stats` takes it.
        block_sizes: as `linear_token_stats` takes them.
        logits_dtype: `"bfloat16"` rounds the logits, as a bfloat16 model does.

    Returns:
        `f(x [B, D], labels [B], w [D, V], *, dtype, logit_soft_cap, precision, block_sizes, return_argmax)`, giving
        cross-entropy and log-sum-exp, each `[B]`, float32, in nats.

    Raises:
        NotImplementedError: by the callable: `return_argmax=True`; a `dtype` but float32 or None (the softmax is
            float32 here, for loss weights of a 16-bit dtype, too: cast them to float32); else as `linear_token_stats`.
        ValueError: by the callable: as `linear_token_stats`.

    Example:
        >>> import jax.numpy as jnp
        >>> loss, lse = fused_cross_entropy()(jnp.ones((2, 3)), jnp.array([0, 3]), jnp.zeros((3, 4)))
        >>> print(loss.round(4))  # ln 4
        [1.3863 1.3863]

    Reference: marin-levanter 0.2.227.dev40316220070, `fused_cross_entropy_loss_and_logsumexp_penalty` of
    `levanter.kernels.pallas.fused_cross_entropy_loss`. Departures: Levanter's own `block_sizes` are not read, for it
    gives a callable those that it infers for its kernels, whether or not a user chose any; float32 inputs multiply at
    HIGHEST precision unless `precision` says otherwise; a label outside the vocabulary gives NaN.
    """
    ours: dict[str, Any] = {"implementation": implementation, "block_sizes": block_sizes, "logits_dtype": logits_dtype}

    def logitless(
        x: jax.Array,
        labels: jax.Array,
        w: jax.Array,
        *,
        block_sizes: Any = None,
        dtype: Any = jnp.float32,
        logit_soft_cap: float | None = None,
        precision: PrecisionLike = None,
        return_argmax: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        del block_sizes
        _check_options(dtype, return_argmax)
        # Levanter leaves hidden states and head in the dtypes that its mixed-precision policy gave each.
        common = jnp.promote_types(x.dtype, w.dtype)
        stats = linear_token_stats(
            x.astype(common),
            w.astype(common),
            labels,
            outputs=("logprobs", "lse"),
            softcap=logit_soft_cap,
            precision=precision,
            **ours,
        )
        assert stats.logprobs is not None
        assert stats.lse is not None
        return -stats.logprobs, stats.lse

    return logitless


def _check_options(dtype: Any, return_argmax: bool) -> None:
    name = "fused_cross_entropy"
    if return_argmax:
        raise NotImplementedError(
            f"{name}: return_argmax=True is not supported: no loss of Logitless finds the largest logit; use an "
            "implementation of Levanter's own, such as 'xla', for evaluation"
        )
    if dtype is not None and jnp.dtype(dtype) != jnp.float32:
        raise NotImplementedError(
            f"{name}: dtype={jnp.dtype(dtype).name} is not supported: softmax and loss are float32; give "
            "dtype=jnp.float32, with loss weights of float32 (Levanter takes the dtype of the weights), and "
            "logits_dtype='bfloat16' where the logits are to be rounded"
        )


@contextmanager
def use_logitless(
    *,
    implementation: str = "auto",
    block_sizes: Mapping[str, int] | None = None,
    logits_dtype: str | None = None,
) -> Iterator[None]:
    """Within it, the losses of Levanter's language models go by `fused_cross_entropy`, where none is named.

    Equal to
        every call of `levanter.models.loss` with implementation=fused_cross_entropy(...) in place of None

    `LmHeadModel.compute_next_token_loss`, which its trainer calls, has no `implementation=` to give. What counts is
    where the step is traced: enter before `trainer.train(...)`, or before the first call of a jitted step.

    Args:
        implementation: as `fused_cross_entropy`, and so for every argument below.
        block_sizes: as there.
        logits_dtype: as there.

    Yields:
        Nothing.

    Raises:
        ImportError: Levanter is not installed (its package is `marin-levanter`).
        NotImplementedError: another version than was tried; within, as `fused_cross_entropy`: the evaluation harness
            asks for `return_argmax`, so run it outside.

    Example:
        >>> def train(trainer, state, loader):  # a levanter.trainer.Trainer
        ...     with use_logitless(implementation="chunked"):
        ...         return trainer.train(state, loader)

    Reference: marin-levanter 0.2.227.dev40316220070, `levanter.models.loss`. Departures: as `fused_cross_entropy`.
    """
    require("marin-levanter", TRIED, module="levanter", asked_by="use_logitless")
    from levanter.models import loss  # pyright: ignore[reportMissingImports] - installed by those who use it

    ours = fused_cross_entropy(implementation=implementation, block_sizes=block_sizes, logits_dtype=logits_dtype)
    theirs = loss.fused_cross_entropy_loss_and_logsumexp_penalty_kernel

    def kernel(*arrays: Any, implementation: Any = None, **options: Any) -> Any:
        return theirs(*arrays, implementation=ours if implementation is None else implementation, **options)

    loss.fused_cross_entropy_loss_and_logsumexp_penalty_kernel = kernel
    try:
        yield
    finally:
        loss.fused_cross_entropy_loss_and_logsumexp_penalty_kernel = theirs
