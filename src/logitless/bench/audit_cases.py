"""`logitless audit CONFIG`: does the GRPO loss of a named implementation hold logits at the sizes of a YAML file?"""

import functools
from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
from rich.console import Console

from logitless.audit import audit
from logitless.bench.errors import BenchError
from logitless.heads import head as known_head
from logitless.losses.linear_presets import linear_grpo_loss


@dataclass(frozen=True)
class AuditConfig:
    """What `logitless audit` traces and compiles; no array is ever made.

    Attributes:
        implementation: as linear_grpo_loss takes it.
        tokens: N, the tokens of all sequences together.
        head: a model whose head gives hidden_size and vocab_size, such as qwen2.5-1.5b.
        hidden_size: D, where no head is named.
        vocab_size: V, where no head is named.
        sequences: B; must divide tokens.
        layout: DV for a head [D, V], VD for [V, D].
        dtype: of hidden and lm_head.
        block_sizes: any of block_n, block_v, block_d, block_bytes.
    """

    implementation: str = "auto"
    tokens: int = 1024
    head: str | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    sequences: int = 1
    layout: Literal["DV", "VD"] = "DV"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    block_sizes: dict[str, int] = field(default_factory=dict)


def run_audit(config: AuditConfig) -> int:
    """Audits `linear_grpo_loss` and its gradients, and prints the report.

    Args:
        config: implementation and sizes.

    Returns:
        The exit code: 0 when no `[tokens, vocab]` array was found, 1 otherwise.

    Raises:
        BenchError: the sizes do not fit each other, or the implementation cannot run.
    """
    hidden_size, vocab_size = _sizes(config)
    shape = (config.sequences, config.tokens // config.sequences)
    dtype = jnp.dtype(config.dtype)
    lm_head = (hidden_size, vocab_size) if config.layout == "DV" else (vocab_size, hidden_size)
    arrays = (
        jax.ShapeDtypeStruct((*shape, hidden_size), dtype),
        jax.ShapeDtypeStruct(lm_head, dtype),
        jax.ShapeDtypeStruct(shape, jnp.int32),  # targets
        jax.ShapeDtypeStruct(shape, jnp.float32),  # old_logprobs
        jax.ShapeDtypeStruct(shape[:1], jnp.float32),  # advantages
        jax.ShapeDtypeStruct(shape, jnp.bool_),  # mask
    )
    loss = functools.partial(
        linear_grpo_loss,
        layout=config.layout,
        implementation=config.implementation,
        block_sizes=config.block_sizes or None,
    )
    try:
        jax.eval_shape(loss, *arrays)
    except (ValueError, NotImplementedError) as error:
        raise BenchError(str(error)) from error
    report = audit(loss, *arrays, vocab_size=vocab_size, num_tokens=config.tokens, differentiate=(0, 1))
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"audit of linear_grpo_loss, implementation {config.implementation}, {config.dtype}, layout {config.layout}: "
        f"N={config.tokens} D={hidden_size} V={vocab_size} on {jax.devices()[0].device_kind}",
        markup=False,
    )
    console.print(str(report), markup=False)
    return 0 if report.ok else 1


def _sizes(config: AuditConfig) -> tuple[int, int]:
    """D and V."""
    if config.tokens < 1 or config.sequences < 1 or config.tokens % config.sequences:
        raise BenchError(
            f"{config.tokens} tokens do not divide into {config.sequences} sequences; both must be positive"
        )
    if config.head is not None:
        if (config.hidden_size, config.vocab_size) != (None, None):
            raise BenchError("give head, or hidden_size and vocab_size, not both")
        try:
            model = known_head(config.head)
        except ValueError as error:
            raise BenchError(str(error)) from error
        return model.hidden_size, model.vocab_size
    if config.hidden_size is None or config.vocab_size is None:
        raise BenchError("give head, or both hidden_size and vocab_size")
    if config.hidden_size < 1 or config.vocab_size < 1:
        raise BenchError(
            f"hidden_size is {config.hidden_size} and vocab_size {config.vocab_size}; both must be positive"
        )
    return config.hidden_size, config.vocab_size
