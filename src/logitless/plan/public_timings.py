"""Public kernels with known chip timings: those that tokamax 0.0.17 ships in its wheel, and the calls that were timed.

tokamax's authors took the times on a TPU v6e. Nothing here was run on a TPU.
"""

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, Literal

import jax
import jax.numpy as jnp

TOKAMAX = "0.0.17"
INSTALL = f"pip install tokamax=={TOKAMAX} 'logitless[tpu]', with Python 3.12"
CHIP = "v6e"
FOLDER = "data/autotuning/tpu_v6_lite"
OP = "linear_softmax_cross_entropy_loss"

Code = Literal["pallas", "plain", "chunked"]
Direction = Literal["forward", "backward"]

_FILE_PREFIX = {"pallas": "pallas_mosaic_tpu_", "plain": "", "chunked": "chunked_xla_"}
_MODULE = {"pallas": "pallas_mosaic_tpu_kernel", "plain": "reference", "chunked": "chunked_xla"}
_SUFFIX = {"pallas": "pallas_mosaic_tpu", "plain": "reference", "chunked": "chunked_xla"}
_XLA_BLOCKS = {"b_block_size": "b_block_sz", "v_block_size": "v_block_sz"}

# The rule, fixed before anything was fitted: all heads that tokamax timed, a small and a large size, both
# directions. One whole head is held out, so that nothing of its sizes is in the fit; the D of others lie on both sides.
HEADS = (
    (2560, 262144),
    (2880, 201088),
    (3840, 262144),
    (4096, 128256),
    (4096, 151936),
    (5120, 151936),
    (7168, 128256),
)
TOKENS = (1024, 16384)
HELD_OUT = (5120, 151936)
XLA_HEADS = ((2560, 262144), (4096, 151936))


class TimingsMissing(ValueError):
    """tokamax, or what it needs, is not there: `str(error)` says what to install."""


@dataclass(frozen=True)
class Timing:
    """A program and the time that it took on a chip.

    Attributes:
        code: Pallas kernel, plain jnp, or XLA's loop over chunks.
        direction: forward alone, or both gradients from what the forward left.
        tokens: N.
        hidden_size: D.
        vocab_size: V.
        config: block sizes and buffers, as the call takes them.
        times_ms: as shipped.
        held_out: not to be fitted to.
    """

    code: Code
    direction: Direction
    tokens: int
    hidden_size: int
    vocab_size: int
    config: dict[str, Any]
    times_ms: tuple[float, ...]
    held_out: bool

    @property
    def measured_ms(self) -> float:
        """The median of the times."""
        return median(self.times_ms)

    def __str__(self) -> str:
        sizes = f"N={self.tokens}, D={self.hidden_size}, V={self.vocab_size}"
        return f"{self.code} {self.direction}, {sizes}"


def public_timings() -> list[Timing]:
    """The programs that calibrate, chosen by the rule above, bfloat16 and reduction `mean`.

    Raises:
        TimingsMissing: see `tokamax_folder`; or its files hold something else.
    """
    folder = tokamax_folder() / FOLDER
    found = []
    for code in ("pallas", "plain", "chunked"):
        for direction in ("forward", "backward"):
            suffix = "_vjp" if direction == "backward" else ""
            path = folder / f"{_FILE_PREFIX[code]}{OP}{suffix}.json"
            try:
                entries = json.loads(path.read_text(encoding="utf-8"))
                found += list(_chosen(entries, code, direction))
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise TimingsMissing(
                    f"plan calibrate: cannot read tokamax's {path.name}: {error!r}; {INSTALL}"
                ) from None
    return sorted(found, key=lambda row: (row.code != "pallas", row.held_out, row.code, row.direction, *_sizes(row)))


def tokamax_folder() -> Path:
    """Where tokamax is installed.

    Raises:
        TimingsMissing: an older Python than it needs, no tokamax, or another version of it.
    """
    if sys.version_info < (3, 12):
        raise TimingsMissing(
            f"plan calibrate: Python {sys.version_info.major}.{sys.version_info.minor}; tokamax, whose public timings "
            f"are read, needs 3.12: {INSTALL}"
        )
    try:
        distribution = metadata.distribution("tokamax")
    except metadata.PackageNotFoundError:
        raise TimingsMissing(
            f"plan calibrate: tokamax, whose public timings are read, is not installed: {INSTALL}"
        ) from None
    if distribution.version != TOKAMAX:
        raise TimingsMissing(
            f"plan calibrate: tokamax {distribution.version} is installed; the timings read are those of {TOKAMAX}: "
            f"{INSTALL}"
        )
    return Path(str(distribution.locate_file("tokamax")))


def program(row: Timing) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
    """The call that was timed, and the shapes of its arguments."""
    module = importlib.import_module(f"tokamax._src.ops.{OP}.{_MODULE[row.code]}")
    direction = "fwd" if row.direction == "forward" else "bwd"
    call = vars(module)[f"{OP}_{direction}_{_SUFFIX[row.code]}"]
    shape, n = jax.ShapeDtypeStruct, row.tokens
    hidden = shape((n, row.hidden_size), jnp.bfloat16)
    lm_head = shape((row.hidden_size, row.vocab_size), jnp.bfloat16)
    d_loss_and_lse = (shape((), jnp.float32), shape((n,), jnp.float32)) if row.direction == "backward" else ()
    args = (*d_loss_and_lse, hidden, shape((n,), jnp.int32), lm_head)
    return partial(call, reduction="mean", **row.config), args


def _chosen(entries: dict[str, dict[str, Any]], code: Code, direction: Direction) -> Iterator[Timing]:
    """Those of a file that the rule takes."""
    heads = HEADS if code == "pallas" else XLA_HEADS
    for key, configs in entries.items():
        case = json.loads(key)
        dtype, (tokens, hidden_size) = _array(case["x"])
        vocab_size = _array(case["w"])[1][1]
        plain = dtype == "bf16" and case["reduction"] == "mean" and not case["return_residuals"]
        head = (hidden_size, vocab_size)
        if not plain or tokens not in TOKENS or head not in heads:
            continue
        # The file holds the best configuration of each case, and no other.
        config, entry = next(iter(configs.items()))
        yield Timing(
            code=code,
            direction=direction,
            tokens=tokens,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            config=_arguments(json.loads(config), code, direction),
            times_ms=tuple(float(ms) for ms in entry["evaluation_times_ms"]),
            held_out=code == "pallas" and head == HELD_OUT,
        )


def _arguments(config: dict[str, Any], code: Code, direction: Direction) -> dict[str, Any]:
    """A configuration as the call names it."""
    if code == "chunked":
        return {_XLA_BLOCKS[name]: value for name, value in config.items()}
    if "buffer_count" not in config:
        return config
    buffers = {"buffer_count": tuple(config["buffer_count"])} if direction == "backward" else {}
    return {name: value for name, value in config.items() if name != "buffer_count"} | buffers


def _array(text: str) -> tuple[str, tuple[int, ...]]:
    """`bf16[1024,4096]` as dtype and shape."""
    found = re.fullmatch(r"(\w+)\[([\d,]*)\]", text)
    if found is None:
        raise ValueError(f"{text!r} is no array")
    return found[1], tuple(int(n) for n in found[2].split(",") if n)


def _sizes(row: Timing) -> tuple[int, int, int]:
    return row.hidden_size, row.vocab_size, row.tokens
