"""Block sizes of the TPU kernels: from the table that ships, else the fastest that fit by a model of bytes and time."""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from logitless.ops.pallas_tpu_vmem import (
    MIB,
    ROWS,
    SUB_COLUMNS,
    HeadProblem,
    Shaped,
    TpuChip,
    chip_of,
    multiplied_columns,
    seconds_of,
    up,
    vmem_of,
)
from logitless.ops.types import LOGIT_BYTES, HeadOptions

TABLE = Path(__file__).parent.parent / "data" / "block_sizes.json"
USABLE = 15 / 16
"""Of VMEM, that blocks are chosen to fill: the model knows the compiler's own buffers from a few dozen kernels."""
WORTH = 1.01
"""A block that is faster by less is not worth the longer compile of a larger one."""
PADDED = 1.04
"""Times N x V: where the blocks of a row of the table hold more, the row is left aside."""
_BLOCK_N = (1024, 768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 16)
_BLOCK_V = (4096, 3072, 2048, 1536, 1024, 768, 512, 256)


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

    @property
    def row_parts(self) -> list[slice]:
        """Rows of a block that the forward pass makes logits of at a time: as even as whole registers allow."""
        most = chip_of(self.options.device_kind).softmax_rows
        size = up(-(-self.block_n // -(-self.block_n // most)), ROWS)
        return [slice(start, min(start + size, self.block_n)) for start in range(0, self.block_n, size)]

    def of_vocab(self, start: int, size: int) -> tuple[slice, slice]:
        """Columns of a block of the head, as it stands."""
        columns = slice(start, start + size)
        return (slice(None), columns) if self.v_axis else (columns, slice(None))


@dataclass(frozen=True)
class Blocks:
    """Block sizes of a kernel, and what its compiler is told.

    Attributes:
        block_n: tokens of a block.
        block_v: vocabulary columns of a block.
        vmem_bytes: that the compiler may use, of each core.
        cores: of the device.
    """

    block_n: int
    block_v: int
    vmem_bytes: int
    cores: int = 1


def blocks_of(kernel: str, hidden: Shaped, lm_head: Shaped, options: HeadOptions) -> Blocks:
    """The block sizes of a kernel, given or chosen; nothing is searched or timed when a program is traced.

    Args:
        kernel: `forward`, `backward` (both gradients), `d_lm_head`, `d_hidden` or `sweep`.
        hidden: `[N, D]`.
        lm_head: as `options.layout` says.
        options: whose `block_n` and `block_v` win; `block_bytes` bounds a block of float32 logits.

    Raises:
        ValueError: sizes that the kernel cannot have, with the nearest that it can; or none fit into VMEM.
    """
    problem, chip = HeadProblem.of(hidden, lm_head, options), chip_of(options.device_kind)
    _check(options)
    if (blocks := _of_table(kernel, problem, chip, options)) is not None:
        return blocks
    if ranked := ranked_blocks(kernel, problem, chip, options):
        return ranked[0]
    raise ValueError(_refusal(kernel, problem, chip, options))


def backward_kernels(hidden: Shaped, lm_head: Shaped, options: HeadOptions) -> tuple[str, ...]:
    """The kernels that make both gradients: one, or two where one does not fit or is slowed down by small blocks.

    Sizes that are given do not count here: too large ones for one kernel are refused, not made up for by two.
    """
    together, *apart = (_best_seconds(k, hidden, lm_head, options) for k in ("backward", "d_hidden", "d_lm_head"))
    # Where nothing fits, the head's gradient says what stands in the way: it needs the most.
    return ("backward",) if together <= sum(apart) and together < float("inf") else ("d_lm_head", "d_hidden")


def takes_sweep(hidden: Shaped, lm_head: Shaped, options: HeadOptions) -> bool:
    """Whether a frozen head goes in one sweep; where that fits in small blocks alone, or not at all, two kernels do."""
    together, *apart = (_best_seconds(k, hidden, lm_head, options) for k in ("sweep", "forward", "d_hidden"))
    return together <= sum(apart) and together < float("inf")


def _best_seconds(kernel: str, hidden: Shaped, lm_head: Shaped, options: HeadOptions) -> float:
    """By the model, with blocks of its own choice; infinite where none fit."""
    problem, chip = HeadProblem.of(hidden, lm_head, options), chip_of(options.device_kind)
    ranked = ranked_blocks(kernel, problem, chip, replace(options, block_n=None, block_v=None, block_bytes=None))
    return _seconds(kernel, problem, chip, ranked[0]) if ranked else float("inf")


def has_room(hidden: Shaped, lm_head: Shaped, options: HeadOptions) -> bool:
    """Whether the smallest blocks of every kernel fit, however many tokens there are."""
    one_token = jax.ShapeDtypeStruct((1, hidden.shape[-1]), hidden.dtype)
    problem = replace(HeadProblem.of(one_token, lm_head, options), statistics=0)
    chip = chip_of(options.device_kind)
    return all(fits(kernel, problem, chip, ROWS, SUB_COLUMNS) for kernel in ("forward", "d_lm_head", "d_hidden"))


def chosen_blocks(hidden: Shaped, lm_head: Shaped, options: HeadOptions) -> dict[str, Blocks]:
    """By the name of each kernel of a loss and both its gradients."""
    kernels = ("forward", *backward_kernels(hidden, lm_head, options))
    return {kernel: blocks_of(kernel, hidden, lm_head, options) for kernel in kernels}


def ranked_blocks(kernel: str, problem: HeadProblem, chip: TpuChip, options: HeadOptions) -> list[Blocks]:
    """Every pair of sizes that fits and that `options` allow, the fastest first; of equals the smallest."""
    fitting = [
        Blocks(n, v, chip.vmem_bytes, chip.cores)
        for n in _sizes_n(problem.tokens, options.block_n)
        for v in _sizes_v(problem.vocab, options.block_v)
        if options.block_bytes is None or n * v * LOGIT_BYTES <= options.block_bytes
        if fits(kernel, problem, chip, n, v)
    ]
    return fastest_first({blocks: _seconds(kernel, problem, chip, blocks) for blocks in fitting})


def fastest_first(times: dict[Blocks, float]) -> list[Blocks]:
    """Sizes by their time in any unit; of those within 1 % of the fastest the smallest, which compiles soonest."""
    good_enough = WORTH * min(times.values(), default=0.0)
    return sorted(times, key=lambda x: (0, x.block_n * x.block_v) if times[x] <= good_enough else (1, times[x]))


def fits(kernel: str, problem: HeadProblem, chip: TpuChip, block_n: int, block_v: int) -> bool:
    """Whether the model says that a kernel compiles."""
    return sum(vmem_of(kernel, problem, block_n, block_v).values()) <= USABLE * chip.vmem_bytes


def _seconds(kernel: str, problem: HeadProblem, chip: TpuChip, blocks: Blocks) -> float:
    """Of a call with all tokens and one with half of them: whole blocks are skipped, and large ones rarely."""
    calls = (problem.tokens, -(-problem.tokens // 2))
    return sum(seconds_of(kernel, problem, chip, blocks.block_n, blocks.block_v, tokens) for tokens in calls)


def _sizes_n(tokens: int, given: int | None) -> Sequence[int]:
    """Tokens of a block to choose from: no more than there are, and cut evenly."""
    most = up(max(tokens, 1), ROWS)
    if given is not None:
        return (min(given, most),)
    sizes = [min(size, most) for size in _BLOCK_N]
    return sorted({*sizes, *(up(-(-tokens // -(-tokens // size)), ROWS) for size in sizes if tokens)}, reverse=True)


def _sizes_v(vocab: int, given: int | None) -> Sequence[int]:
    most = up(vocab, SUB_COLUMNS)
    return tuple(dict.fromkeys(min(size, most) for size in ((given,) if given is not None else _BLOCK_V)))


def _check(options: HeadOptions) -> None:
    """Raises ValueError for sizes that no kernel has."""
    for name, given, multiple in (("block_n", options.block_n, ROWS), ("block_v", options.block_v, SUB_COLUMNS)):
        if given is not None and given % multiple:
            near = " or ".join(str(x) for x in (given // multiple * multiple, up(given, multiple)) if x)
            raise ValueError(
                f"pallas_tpu: block_sizes: {name}={given}; it must be a multiple of {multiple}: {near} is nearest"
            )


def _refusal(kernel: str, problem: HeadProblem, chip: TpuChip, options: HeadOptions) -> str:
    """Why no block sizes will do, and what would."""
    free = replace(options, block_n=None, block_v=None, block_bytes=None)
    where = f"pallas_tpu: the kernel {kernel!r} at D = {problem.hidden_size}, V = {problem.vocab} on a {chip.name}"
    near = [
        ranked_blocks(kernel, problem, chip, some)[:1]
        for some in (replace(free, block_n=options.block_n), replace(free, block_v=options.block_v), free)
    ]
    found = dict.fromkeys(f"block_n={x.block_n}, block_v={x.block_v}" for best in near for x in best)
    if options.block_bytes is not None:
        smallest = min(_sizes_n(problem.tokens, options.block_n)) * min(_sizes_v(problem.vocab, options.block_v))
        if found and options.block_bytes < smallest * LOGIT_BYTES:
            return (
                f"{where}: block_bytes={options.block_bytes}; its smallest block has {smallest * LOGIT_BYTES} bytes of "
                "float32 logits: give as many, or use implementation='chunked'"
            )
    n, v = min(_sizes_n(problem.tokens, options.block_n)), min(_sizes_v(problem.vocab, options.block_v))
    budget = vmem_of(kernel, problem, n, v)
    taken = ", ".join(f"{name} {size / MIB:.2f}" for name, size in budget.items())
    room = (
        f"{sum(budget.values()) / MIB:.2f} MiB of VMEM where {USABLE * chip.vmem_bytes / MIB:g} can be used ({taken})"
    )
    if found:
        return f"{where}: block_n={n}, block_v={v} take {room}; nearest that fit this kernel: {'; or '.join(found)}"
    return f"{where}: the smallest blocks, {n} x {v}, take {room}: use implementation='chunked'"


def _of_table(kernel: str, problem: HeadProblem, chip: TpuChip, options: HeadOptions) -> Blocks | None:
    """The row for this D and dtype, of the nearest V; None where sizes are given, or it does not suit these N and V."""
    if (options.block_n, options.block_v, options.block_bytes) != (None, None, None):
        return None
    if problem.hidden_dtype != problem.head_dtype:
        return None
    rows = [row for row in read_table() if _key(row) == (chip.name, kernel, problem.hidden_size, str(problem.common))]
    if not rows:
        return None
    row = min(rows, key=lambda row: abs(row["vocab_size"] - problem.vocab))
    n, v = row["block_n"], row["block_v"]
    # With fewer tokens other blocks skip better, and with more statistics or an odd V less fits.
    if problem.tokens < 2 * n or problem.vocab < v or not fits(kernel, problem, chip, n, v):
        return None
    # It was made for one N and V: of others it may cut a last block that is mostly padding.
    if up(problem.tokens, n) * multiplied_columns(kernel, problem.vocab, v) > PADDED * problem.tokens * problem.vocab:
        return None
    return Blocks(n, v, chip.vmem_bytes, chip.cores)


def _key(row: dict[str, Any]) -> tuple[str, str, int, str]:
    return row["chip"], row["kernel"], row["hidden_size"], row["dtype"]


@functools.cache
def read_table() -> tuple[dict[str, Any], ...]:
    """The rows that ship; `logitless bench tune` makes them."""
    return tuple(json.loads(TABLE.read_text(encoding="utf-8")))


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
