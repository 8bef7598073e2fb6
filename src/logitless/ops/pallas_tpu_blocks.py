"""Block sizes of the TPU kernels: what fits into VMEM, by a model of the bytes."""

from dataclasses import dataclass

import jax

from logitless.ops.types import HeadOptions


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
