"""One preset of `linear_policy_loss` for each paper: those of `policy_presets`, from hidden states and LM head."""

from typing import Unpack

from logitless._arrays import FloatArray, IntArray, MaskArray
from logitless.losses.linear import LinearPolicyOptions, policy_from_hidden
from logitless.losses.policy import LossOutput
from logitless.losses.policy_presets import bnpo_loss, dapo_loss, dr_grpo_loss, grpo_loss, gspo_loss, luspo_loss
from logitless.losses.policy_presets_soft import cispo_loss, sapo_loss, vespo_loss


def linear_grpo_loss(
    hidden: FloatArray,
    lm_head: FloatArray,
    targets: IntArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    **options: Unpack[LinearPolicyOptions],
) -> LossOutput:
    """GRPO straight from hidden states and LM head; `grpo_loss` of `linear_logprobs`, without the logits.

    Equal to
        grpo_loss(log_softmax(hidden @ lm_head)[targets], old_logprobs, advantages, mask, ...)

    Goes in one pass over the head where the options allow it, as `linear_policy_loss` says.

    Args:
        hidden: `[B, T, D]`.
        lm_head: `[D, V]`, or `[V, D]` with `layout="VD"`.
        targets: sampled token ids, `[B, T]`.
        old_logprobs: `[B, T]`, or None for on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts, the rest is skipped.
        **options: those of `grpo_loss`, and of the head as `linear_policy_loss` takes them.

    Returns:
        `LossOutput`.

    Raises:
        ValueError: as `linear_policy_loss`.
        TypeError: as `linear_policy_loss`.
        NotImplementedError: as `linear_policy_loss`.

    Example:
        >>> import jax.numpy as jnp
        >>> hidden, lm_head, targets = jnp.ones((1, 2, 3)), jnp.zeros((3, 4)), jnp.array([[0, 3]])
        >>> ones = jnp.array([[1, 1]])
        >>> linear_grpo_loss(hidden, lm_head, targets, None, jnp.array([0.5]), ones).loss.item()
        -0.5

    Reference: https://arxiv.org/abs/2402.03300; departures: as `grpo_loss`.
    """
    return policy_from_hidden(grpo_loss, hidden, lm_head, targets, old_logprobs, advantages, mask, options)


def linear_bnpo_loss(
    hidden: FloatArray,
    lm_head: FloatArray,
    targets: IntArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    **options: Unpack[LinearPolicyOptions],
) -> LossOutput:
    """BNPO straight from hidden states and LM head; `bnpo_loss` of `linear_logprobs`, without the logits.

    Equal to
        bnpo_loss(log_softmax(hidden @ lm_head)[targets], old_logprobs, advantages, mask, ...)

    Goes in one pass over the head where the options allow it, as `linear_policy_loss` says.

    Args:
        hidden: `[B, T, D]`.
        lm_head: `[D, V]`, or `[V, D]` with `layout="VD"`.
        targets: sampled token ids, `[B, T]`.
        old_logprobs: `[B, T]`, or None for on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts, the rest is skipped.
        **options: those of `bnpo_loss`, and of the head as `linear_policy_loss` takes them.

    Returns:
        `LossOutput`.

    Raises:
        ValueError: as `linear_policy_loss`.
        TypeError: as `linear_policy_loss`.
        NotImplementedError: as `linear_policy_loss`.

    Example:
        >>> import jax.numpy as jnp
        >>> hidden, lm_head, targets = jnp.ones((1, 2, 3)), jnp.zeros((3, 4)), jnp.array([[0, 3]])
        >>> ones = jnp.array([[1, 1]])
        >>> linear_bnpo_loss(hidden, lm_head, targets, None, jnp.array([0.5]), ones).loss.item()
        -0.5

    Reference: https://arxiv.org/abs/2506.02864; departures: as `bnpo_loss`.
    """
    return policy_from_hidden(bnpo_loss, hidden, lm_head, targets, old_logprobs, advantages, mask, options)


def linear_dr_grpo_loss(
    hidden: FloatArray,
    lm_head: FloatArray,
    targets: IntArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    **options: Unpack[LinearPolicyOptions],
) -> LossOutput:
    """Dr. GRPO straight from hidden states and LM head; `dr_grpo_loss` of `linear_logprobs`, without the logits.

    Equal to
        dr_grpo_loss(log_softmax(hidden @ lm_head)[targets], old_logprobs, advantages, mask, ...)

    Goes in one pass over the head where the options allow it, as `linear_policy_loss` says.

    Args:
        hidden: `[B, T, D]`.
        lm_head: `[D, V]`, or `[V, D]` with `layout="VD"`.
        targets: sampled token ids, `[B, T]`.
        old_logprobs: `[B, T]`, or None for on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts, the rest is skipped.
        **options: those of `dr_grpo_loss`, and of the head as `linear_policy_loss` takes them.

    Returns:
        `LossOutput`.

    Raises:
        ValueError: as `linear_policy_loss`.
        TypeError: as `linear_policy_loss`.
        NotImplementedError: as `linear_policy_loss`.

    Example:
        >>> import jax.numpy as jnp
        >>> hidden, lm_head, targets = jnp.ones((1, 2, 3)), jnp.zeros((3, 4)), jnp.array([[0, 3]])
        >>> inputs = hidden, lm_head, targets, None, jnp.array([0.5]), jnp.array([[1, 1]])
        >>> linear_dr_grpo_loss(*inputs, max_completion_length=4).loss.item()
        -0.25

    Reference: https://arxiv.org/abs/2503.20783; departures: as `dr_grpo_loss`.
    """
    return policy_from_hidden(dr_grpo_loss, hidden, lm_head, targets, old_logprobs, advantages, mask, options)


def linear_dapo_loss(
    hidden: FloatArray,
    lm_head: FloatArray,
    targets: IntArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    **options: Unpack[LinearPolicyOptions],
) -> LossOutput:
    """DAPO straight from hidden states and LM head; `dapo_loss` of `linear_logprobs`, without the logits.

    Equal to
        dapo_loss(log_softmax(hidden @ lm_head)[targets], old_logprobs, advantages, mask, ...)

    Goes in one pass over the head where the options allow it, as `linear_policy_loss` says.

    Args:
        hidden: `[B, T, D]`.
        lm_head: `[D, V]`, or `[V, D]` with `layout="VD"`.
        targets: sampled token ids, `[B, T]`.
        old_logprobs: `[B, T]`, or None for on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts, the rest is skipped.
        **options: those of `dapo_loss`, and of the head as `linear_policy_loss` takes them.

    Returns:
        `LossOutput`.

    Raises:
        ValueError: as `linear_policy_loss`.
        TypeError: as `linear_policy_loss`.
        NotImplementedError: as `linear_policy_loss`.

    Example:
        >>> import jax.numpy as jnp
        >>> hidden, lm_head, targets = jnp.ones((1, 2, 3)), jnp.zeros((3, 4)), jnp.array([[0, 3]])
        >>> ones = jnp.array([[1, 1]])
        >>> linear_dapo_loss(hidden, lm_head, targets, None, jnp.array([0.5]), ones, total=4).loss.item()
        -0.25

    Reference: https://arxiv.org/abs/2503.14476; departures: as `dapo_loss`.
    """
    return policy_from_hidden(dapo_loss, hidden, lm_head, targets, old_logprobs, advantages, mask, options)


def linear_gspo_loss(
    hidden: FloatArray,
    lm_head: FloatArray,
    targets: IntArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    **options: Unpack[LinearPolicyOptions],
) -> LossOutput:
    """GSPO straight from hidden states and LM head; `gspo_loss` of `linear_logprobs`, without the logits.

    Equal to
        gspo_loss(log_softmax(hidden @ lm_head)[targets], old_logprobs, advantages, mask, ...)

    Args:
        hidden: `[B, T, D]`.
        lm_head: `[D, V]`, or `[V, D]` with `layout="VD"`.
        targets: sampled token ids, `[B, T]`.
        old_logprobs: `[B, T]`, or None for on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts, the rest is skipped.
        **options: those of `gspo_loss`, and of the head as `linear_policy_loss` takes them.

    Returns:
        `LossOutput`.

    Raises:
        ValueError: as `linear_policy_loss`.
        TypeError: as `linear_policy_loss`.
        NotImplementedError: as `linear_policy_loss`.

    Example:
        >>> import jax.numpy as jnp
        >>> hidden, lm_head, targets = jnp.ones((1, 2, 3)), jnp.zeros((3, 4)), jnp.array([[0, 3]])
        >>> ones = jnp.array([[1, 1]])
        >>> linear_gspo_loss(hidden, lm_head, targets, None, jnp.array([0.5]), ones).loss.item()
        -0.5

    Reference: https://arxiv.org/abs/2507.18071; departures: as `gspo_loss`.
    """
    return policy_from_hidden(gspo_loss, hidden, lm_head, targets, old_logprobs, advantages, mask, options)


def linear_cispo_loss(
    hidden: FloatArray,
    lm_head: FloatArray,
    targets: IntArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    **options: Unpack[LinearPolicyOptions],
) -> LossOutput:
    """CISPO straight from hidden states and LM head; `cispo_loss` of `linear_logprobs`, without the logits.

    Equal to
        cispo_loss(log_softmax(hidden @ lm_head)[targets], old_logprobs, advantages, mask, ...)

    Goes in one pass over the head where the options allow it, as `linear_policy_loss` says.

    Args:
        hidden: `[B, T, D]`.
        lm_head: `[D, V]`, or `[V, D]` with `layout="VD"`.
        targets: sampled token ids, `[B, T]`.
        old_logprobs: `[B, T]`, or None for on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts, the rest is skipped.
        **options: those of `cispo_loss`, and of the head as `linear_policy_loss` takes them.

    Returns:
        `LossOutput`.

    Raises:
        ValueError: as `linear_policy_loss`.
        TypeError: as `linear_policy_loss`.
        NotImplementedError: as `linear_policy_loss`.

    Example:
        >>> import jax.numpy as jnp
        >>> hidden, lm_head, targets = jnp.ones((1, 2, 3)), jnp.zeros((3, 4)), jnp.array([[0, 3]])
        >>> ones = jnp.array([[1, 1]])
        >>> loss = linear_cispo_loss(hidden, lm_head, targets, None, jnp.array([0.5]), ones).loss
        >>> round(loss.item(), 4)  # ln(4) / 2
        0.6931

    Reference: https://arxiv.org/abs/2506.13585; departures: as `cispo_loss`.
    """
    return policy_from_hidden(cispo_loss, hidden, lm_head, targets, old_logprobs, advantages, mask, options)


def linear_sapo_loss(
    hidden: FloatArray,
    lm_head: FloatArray,
    targets: IntArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    **options: Unpack[LinearPolicyOptions],
) -> LossOutput:
    """SAPO straight from hidden states and LM head; `sapo_loss` of `linear_logprobs`, without the logits.

    Equal to
        sapo_loss(log_softmax(hidden @ lm_head)[targets], old_logprobs, advantages, mask, ...)

    Goes in one pass over the head where the options allow it, as `linear_policy_loss` says.

    Args:
        hidden: `[B, T, D]`.
        lm_head: `[D, V]`, or `[V, D]` with `layout="VD"`.
        targets: sampled token ids, `[B, T]`.
        old_logprobs: `[B, T]`, or None for on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts, the rest is skipped.
        **options: those of `sapo_loss`, and of the head as `linear_policy_loss` takes them.

    Returns:
        `LossOutput`.

    Raises:
        ValueError: as `linear_policy_loss`.
        TypeError: as `linear_policy_loss`.
        NotImplementedError: as `linear_policy_loss`.

    Example:
        >>> import jax.numpy as jnp
        >>> hidden, lm_head, targets = jnp.ones((1, 2, 3)), jnp.zeros((3, 4)), jnp.array([[0, 3]])
        >>> ones = jnp.array([[1, 1]])
        >>> linear_sapo_loss(hidden, lm_head, targets, None, jnp.array([0.5]), ones).loss.item()
        -1.0

    Reference: https://arxiv.org/abs/2511.20347; departures: as `sapo_loss`.
    """
    return policy_from_hidden(sapo_loss, hidden, lm_head, targets, old_logprobs, advantages, mask, options)


def linear_luspo_loss(
    hidden: FloatArray,
    lm_head: FloatArray,
    targets: IntArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    **options: Unpack[LinearPolicyOptions],
) -> LossOutput:
    """LUSPO straight from hidden states and LM head; `luspo_loss` of `linear_logprobs`, without the logits.

    Equal to
        luspo_loss(log_softmax(hidden @ lm_head)[targets], old_logprobs, advantages, mask, ...)

    Args:
        hidden: `[B, T, D]`.
        lm_head: `[D, V]`, or `[V, D]` with `layout="VD"`.
        targets: sampled token ids, `[B, T]`.
        old_logprobs: `[B, T]`, or None for on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts, the rest is skipped.
        **options: those of `luspo_loss`, and of the head as `linear_policy_loss` takes them.

    Returns:
        `LossOutput`.

    Raises:
        ValueError: as `linear_policy_loss`.
        TypeError: as `linear_policy_loss`.
        NotImplementedError: as `linear_policy_loss`.

    Example:
        >>> import jax.numpy as jnp
        >>> hidden, lm_head, targets = jnp.ones((1, 2, 3)), jnp.zeros((3, 4)), jnp.array([[0, 3]])
        >>> ones = jnp.array([[1, 1]])
        >>> linear_luspo_loss(hidden, lm_head, targets, None, jnp.array([0.5]), ones).loss.item()
        -1.0

    Reference: https://arxiv.org/abs/2602.05261; departures: as `luspo_loss`.
    """
    return policy_from_hidden(luspo_loss, hidden, lm_head, targets, old_logprobs, advantages, mask, options)


def linear_vespo_loss(
    hidden: FloatArray,
    lm_head: FloatArray,
    targets: IntArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    **options: Unpack[LinearPolicyOptions],
) -> LossOutput:
    """VESPO straight from hidden states and LM head; `vespo_loss` of `linear_logprobs`, without the logits.

    Equal to
        vespo_loss(log_softmax(hidden @ lm_head)[targets], old_logprobs, advantages, mask, ...)

    Args:
        hidden: `[B, T, D]`.
        lm_head: `[D, V]`, or `[V, D]` with `layout="VD"`.
        targets: sampled token ids, `[B, T]`.
        old_logprobs: `[B, T]`, or None for on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts, the rest is skipped.
        **options: those of `vespo_loss`, and of the head as `linear_policy_loss` takes them.

    Returns:
        `LossOutput`.

    Raises:
        ValueError: as `linear_policy_loss`.
        TypeError: as `linear_policy_loss`.
        NotImplementedError: as `linear_policy_loss`.

    Example:
        >>> import jax.numpy as jnp
        >>> hidden, lm_head, targets = jnp.ones((1, 2, 3)), jnp.zeros((3, 4)), jnp.array([[0, 3]])
        >>> ones = jnp.array([[1, 1]])
        >>> loss = linear_vespo_loss(hidden, lm_head, targets, None, jnp.array([0.5]), ones).loss
        >>> round(loss.item(), 4)  # ln(4) / 2
        0.6931

    Reference: https://arxiv.org/abs/2602.10693; departures: as `vespo_loss`.
    """
    return policy_from_hidden(vespo_loss, hidden, lm_head, targets, old_logprobs, advantages, mask, options)
