"""Block sizes of the TPU kernels: what fits into VMEM, by a model of the bytes."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from logitless.ops.types import HeadOptions


@dataclass(frozen=True)
class Cut:
    """The static side of a kernel: how tokens and vocabulary are cut.

    Attributes:
        vocab: V.
        block_n: tokens of a block.
        block_v: vocabulary columns of a block.
        vmem_bytes: what the compiler may use.
        cores: that share a device: the first axis of every grid.
        dtype: of logits and sums.
        options: of the head.
    """

    vocab: int
    block_n: int
    block_v: int
    vmem_bytes: int
    cores: int
    dtype: np.dtype
    options: HeadOptions

    @property
    def v_axis(self) -> int:
        return self.options.layout.index("V")

    @property
    def blocks(self) -> int:
        return -(-self.vocab // self.block_v)

    @property
    def blocks_of_core(self) -> int:
        return -(-self.blocks // self.cores)

    @property
    def last(self) -> int:
        """Columns of the last block of the vocabulary."""
        return self.vocab - (self.blocks - 1) * self.block_v

    @property
    def lowest(self) -> float:
        """Running maximum before any column is met: no finite logit is lower."""
        return float(jnp.finfo(self.dtype).min)

    def of_vocab(self, start: int, size: int) -> tuple[slice, slice]:
        """Columns of a block of the head, as it stands."""
        columns = slice(start, start + size)
        return (slice(None), columns) if self.v_axis else (columns, slice(None))


@dataclass(frozen=True)
class Blocks:
    block_n: int
    block_v: int
    vmem_bytes: int
    cores: int = 1


def blocks_of(kernel: str, hidden: jax.Array, lm_head: jax.Array, options: HeadOptions) -> Blocks:
    n = options.block_n or (512 if kernel == "backward" else 1024)
    n = min(n, -(-hidden.shape[0] // 16) * 16)
    return Blocks(n, options.block_v or 2048, 120 * 2**20)


def share_with_targets(kernel: str, grid: tuple[int, ...]) -> float | None:
    """The largest share of a forward kernel's steps that meet a target, tokens sorted by target; None for another.

    Going through the sorted tokens, each step goes on by a block of tokens or by one of the vocabulary: there are no
    more pairs that meet than there are blocks of both. The last block of the vocabulary has a branch of its own.
    """
    if not any(part in kernel for part in ("logitless_forward", "logitless_sweep")) or len(grid) != 3:
        return None
    cores, blocks_n, blocks_v = grid
    tokens = cores * blocks_n
    return min(1.0, (tokens + blocks_v - 1) / (tokens * blocks_v))
