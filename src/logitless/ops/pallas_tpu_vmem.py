"""What a TPU's kernels take of its VMEM: the chips, and a model of the bytes of each kernel."""

from dataclasses import dataclass

import jax
import numpy as np

from logitless._arrays import accumulator, common_dtype
from logitless.ops.types import HeadOptions

LANES = 128
SUB_COLUMNS = 256
CHUNK_ROWS = 128
"""Most tokens whose targets' columns the sweep collects together."""
MXU_COLUMNS = 256
STEP_S = 4e-7
"""To fill and drain the matrix units, for each product of a step."""
ROWS = 16
"""Tokens of a block are a multiple of it: whole registers of 16-bit floats."""
RING = 3
STAGED_COLUMNS = 256

MIB = 2**20

Shaped = jax.Array | jax.ShapeDtypeStruct
"""What has a shape and a dtype, which is all that is asked of it here."""
_BUFFERS = 2
"""Of a block that the pipeline moves: one is copied while the other is used."""


@dataclass(frozen=True)
class TpuChip:
    """A TPU as JAX shows it; every figure is that of one device.

    Attributes:
        name: as `logitless.plan` calls it.
        vmem_bytes: of a core.
        cores: of a device.
        flops_per_s: of bfloat16 products.
        hbm_bytes_per_s: bandwidth.
        softmax_rows: how many tokens' logits the forward pass makes at a time, by the compiler's schedules.
    """

    name: str
    vmem_bytes: int
    cores: int
    flops_per_s: float
    hbm_bytes_per_s: float
    softmax_rows: int = 1024


_V5E = TpuChip("v5e", 128 * MIB, 1, 1.97e14, 8.2e11)
_V5P = TpuChip("v5p", 64 * MIB, 2, 4.59e14, 2.46e12)
_V6E = TpuChip("v6e", 128 * MIB, 1, 9.2e14, 1.64e12, softmax_rows=512)
TPU_CHIPS = {
    "TPU v4": TpuChip("v4", 16 * MIB, 1, 1.375e14, 6.15e11),
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "TPU7x": TpuChip("7x", 64 * MIB, 1, 1.155e15, 3.7e12),
}
"""By the kinds of device that JAX names; `logitless.plan.CHIPS` says the same of them."""


def chip_of(device_kind: str) -> TpuChip:
    """The chip of a kind of device; for any other device, where the kernels are only simulated, a v6e."""
    return TPU_CHIPS.get(device_kind, _V6E)


@dataclass(frozen=True)
class HeadProblem:
    """The sizes and dtypes that the bytes of a kernel depend on.

    Attributes:
        tokens: N.
        hidden_size: D.
        vocab: V.
        hidden_dtype: of the hidden states.
        head_dtype: of the head.
        statistics: how many numbers a token has beside those of its log-probability: entropy, mean of logits.
        wide_gradients: whether gradients leave in the dtype of the sums.
        in_pieces: whether the gradient of a block of the head can leave in pieces by the head's layout, too.
    """

    tokens: int
    hidden_size: int
    vocab: int
    hidden_dtype: np.dtype
    head_dtype: np.dtype
    statistics: int = 0
    wide_gradients: bool = False
    in_pieces: bool = False

    @classmethod
    def of(cls, hidden: Shaped, lm_head: Shaped, options: HeadOptions) -> "HeadProblem":
        vocab, statistics = lm_head.shape[options.layout.index("V")], {"entropy", "mean_logits"} & {*options.outputs}
        tokens, hidden_size = hidden.shape
        dtypes, wide = (hidden.dtype, lm_head.dtype), options.wide_gradients
        return cls(tokens, hidden_size, vocab, *dtypes, len(statistics), wide, leaves_in_pieces(vocab, options.layout))

    @property
    def common(self) -> np.dtype:
        return common_dtype(self.hidden_dtype, self.head_dtype)

    @property
    def sums(self) -> np.dtype:
        return accumulator(self.hidden_dtype, self.head_dtype)

    def padded(self) -> int:
        """Columns of a row of D as VMEM holds it."""
        return up(self.hidden_size, LANES)


def up(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def leaves_in_pieces(vocab: int, layout: str) -> bool:
    """Whether the vocabulary ends where a register does, by lanes or by rows: a copy of a kernel's own ends there."""
    return vocab % (LANES if layout == "DV" else ROWS) == 0


def vmem_of(kernel: str, problem: HeadProblem, block_n: int, block_v: int) -> dict[str, int]:
    """Bytes of VMEM that each buffer of a kernel takes, by name; their sum is what the compiler needs at most.

    Args:
        kernel: `forward`, `backward` (both gradients), `d_lm_head`, `d_hidden` or `sweep`.
        problem: sizes and dtypes.
        block_n: tokens of a block.
        block_v: vocabulary columns of a block.
    """
    narrow, head, wide, common = (
        dtype.itemsize for dtype in (problem.hidden_dtype, problem.head_dtype, problem.sums, problem.common)
    )
    rows, columns = problem.padded() * block_n, problem.padded() * block_v
    # One number a token or a column still fills a register's lanes or rows.
    per_token, per_column = block_n * LANES * wide, 8 * block_v * wide
    tile = block_n * block_v
    found = {
        "hidden states": _BUFFERS * rows * narrow,
        "block of the head": _BUFFERS * columns * head,
        "targets and bias": _BUFFERS * (block_n * LANES * 4 + per_column),
    }
    if kernel == "forward":
        found["running sums"] = _BUFFERS * (3 + problem.statistics) * per_token
    elif kernel == "sweep":
        found["running sums"] = _BUFFERS * (3 + problem.statistics) * per_token
        found["logits and weights"] = tile * (wide + common)
        # They leave through one buffer each; in one layout the sweep collects the targets' columns as well.
        found["mean column of the head"] = rows * (wide + common + head)
    else:
        found["terms of the gradient"] = _BUFFERS * (3 + problem.statistics) * per_token
        found["gradient of the logits"] = tile * common
        if kernel == "d_hidden":
            gradient = wide if problem.wide_gradients else narrow
            found["gradient of the hidden states"] = rows * wide + _BUFFERS * rows * gradient
        else:
            # Where a block cannot leave in pieces it leaves whole, through two buffers.
            in_pieces = problem.in_pieces or leaves_in_pieces(problem.vocab, "DV")
            leaving = STAGED_COLUMNS * problem.padded() if in_pieces else columns
            gradient = wide if problem.wide_gradients else head
            found["gradient of the head"] = columns * wide + _BUFFERS * leaving * gradient + _BUFFERS * per_column
        if kernel == "backward":
            found["gradient of the hidden states"] = RING * rows * wide
    found["the compiler's own"] = _compilers_own(kernel, problem, block_n, block_v // SUB_COLUMNS)
    return found


def _compilers_own(kernel: str, problem: HeadProblem, block_n: int, sub_tiles: int) -> int:
    """Logits on their way through registers: fitted to what libtpu takes, from above."""
    sub_tile = block_n * SUB_COLUMNS * problem.sums.itemsize
    # The more so the longer the sums of a product are, and most on chips that cannot keep them in the matrix units.
    kept = 8 + -(-problem.hidden_size // 1024)
    taken = (kept + 2 * problem.statistics) * sub_tile + MIB // 2
    if kernel == "sweep":
        taken += 5 * CHUNK_ROWS * problem.padded() * problem.sums.itemsize
    if problem.common.itemsize > 2:
        # A product in float32 is one of several parts of each operand.
        d, columns = problem.padded(), SUB_COLUMNS if kernel == "forward" else sub_tiles * SUB_COLUMNS
        taken += 10 * (d * (block_n + SUB_COLUMNS) + block_n * columns)
    return taken


def multiplied_columns(kernel: str, vocab: int, block_v: int) -> int:
    """Of the vocabulary, by a product: the sub-tiles that a last block does not have are left out where tokens lead."""
    return up(vocab, SUB_COLUMNS if kernel in ("forward", "sweep") else block_v)


def seconds_of(kernel: str, problem: HeadProblem, chip: TpuChip, block_n: int, block_v: int, tokens: int) -> float:
    """About how long a kernel takes for so many tokens, to rank blocks by.

    Products of the padded sizes and their copies, in proportions that public timings show: copies of more than half
    the products' time slow them down (`logitless.plan.calibration`).
    """
    narrow, head, wide = (x.itemsize for x in (problem.hidden_dtype, problem.head_dtype, problem.sums))
    d, row_blocks, column_blocks = problem.padded(), max(1, -(-tokens // block_n)), -(-problem.vocab // block_v)
    by_tokens = kernel not in ("backward", "d_lm_head")
    if by_tokens:
        row_blocks = up(row_blocks, chip.cores)
    columns = multiplied_columns(kernel, problem.vocab, block_v)
    # The matrix units take 256 of the axis that is summed over at a time, and float32 in several passes.
    over_tokens = up(block_n, MXU_COLUMNS)
    logits, to_hidden, to_head = block_n * columns * d, block_n * columns * d, over_tokens * columns * d
    products = {
        "forward": (logits,),
        "sweep": (logits, to_hidden),
        "d_hidden": (logits, to_hidden),
        "d_lm_head": (logits, to_head),
        "backward": (logits, to_hidden, to_head),
    }[kernel]
    passes = 1 if problem.common.itemsize == 2 else 4
    busy = row_blocks * passes * 2 * sum(products) / chip.flops_per_s
    busy += row_blocks * column_blocks * len(products) * STEP_S / chip.cores
    whole_hidden, whole_head = row_blocks * block_n * d, columns * d
    if by_tokens:
        moved = row_blocks * whole_head * head + 2 * whole_hidden * narrow
    else:
        moved = column_blocks * whole_hidden * narrow + 2 * whole_head * head
        if kernel == "backward" and row_blocks > RING:
            moved += 2 * column_blocks * whole_hidden * wide
    if kernel == "sweep" and block_n % CHUNK_ROWS:
        # It collects the targets' columns by chunks of tokens that divide the block: small ones here.
        busy *= 1.05
    copies = moved / chip.hbm_bytes_per_s
    ratio = copies / busy
    return busy * max(1.0, ratio) * (1.03 + 0.42 * min(max(0.0, ratio - 0.5), 0.5))
