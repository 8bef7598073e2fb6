"""The chips and cards that a program can be planned for: topologies, capacities, speeds."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from logitless._arrays import check_name

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Chip:
    """One kind of chip or card; every figure is that of one JAX device.

    Attributes:
        name: as in `topology="v6e:2x2"`.
        platform: `tpu` or `cuda`.
        device_kind: what JAX calls it.
        devices: JAX devices of a chip, where programs are compiled ahead of time.
        cores: of a device.
        hbm_bytes: what the compiler lets a program have; on a card all of its memory.
        vmem_bytes: of a core, as the compiler counts; None on a card.
        hbm_bytes_per_s: bandwidth.
        flops_per_s: of bfloat16 products.
        clock_hz: of the cores, in whose cycles the compiler estimates; None on a card, where it estimates none.
        smallest: the smallest topology that the compiler knows; one chip is planned on its first device.
        compiler_name: of the chip in the compiler's own names of topologies.
        target: on a card, what XLA has to know of it.
        granule_bytes: what a TPU counts its copies in.
    """

    name: str
    platform: Literal["tpu", "cuda"]
    device_kind: str
    devices: int
    cores: int
    hbm_bytes: int
    vmem_bytes: int | None
    hbm_bytes_per_s: float
    flops_per_s: float
    clock_hz: float | None
    smallest: str
    compiler_name: str
    target: str | None = None
    granule_bytes: int = 32


def _tpu(
    name: str,
    device_kind: str,
    devices: int,
    cores: int,
    hbm_gib: float,
    vmem_mib: int,
    chip: tuple[float, float],
    clock_hz: float,
    smallest: str,
    compiler_name: str = "",
) -> Chip:
    """`chip`: bytes of HBM a second, and bfloat16 operations a second, of the whole chip."""
    return Chip(
        name=name,
        platform="tpu",
        device_kind=device_kind,
        devices=devices,
        cores=cores,
        hbm_bytes=int(hbm_gib * GIB),
        vmem_bytes=vmem_mib * MIB,
        hbm_bytes_per_s=chip[0] / devices,
        flops_per_s=chip[1] / devices,
        clock_hz=clock_hz,
        smallest=smallest,
        compiler_name=compiler_name or name,
        granule_bytes=512 if name == "v4" else 32,
    )


def _card(
    name: str, device_kind: str, memory_bytes: int, bandwidth: float, flops: float, sizes: Mapping[str, object]
) -> Chip:
    target = _TARGET.format(device_kind=device_kind, memory=memory_bytes, bandwidth=int(bandwidth), **sizes)
    return Chip(name, "cuda", device_kind, 1, 1, memory_bytes, None, bandwidth, flops, None, "", "", target)


# The GpuTargetConfigProto of XLA, in text form.
_TARGET = """\
gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared_per_core} threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: {clock} device_memory_size: {memory}
  shared_memory_per_block_optin: {shared_optin} cuda_compute_capability {{ major: {major} minor: 0 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} device_description_str: "{device_kind}"
"""

# HBM: what libtpu 0.0.42.1 and 0.0.52 name as available when a program takes too much, the smaller of the two.
# Bandwidth and products: `jax.experimental.pallas.tpu.get_tpu_info_for_chip`. Clocks: products over the MXUs of a chip.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _tpu("v4", "TPU v4", 2, 1, 15.25, 16, (1.23e12, 2.75e14), 1.05e9, "2x2x1"),
        _tpu("v5e", "TPU v5 lite", 1, 1, 15.75, 128, (8.2e11, 1.97e14), 1.5e9, "2x2"),
        _tpu("v5p", "TPU v5", 1, 2, 95.73, 64, (2.46e12, 4.59e14), 1.75e9, "2x2x1"),
        _tpu("v6e", "TPU v6 lite", 1, 1, 31.24, 128, (1.64e12, 9.2e14), 1.75e9, "2x2"),
        _tpu("7x", "TPU7x", 2, 1, 94.74, 64, (7.4e12, 2.31e15), 2.2e9, "2x2x1", compiler_name="tpu7x"),
        _card(
            "h100",
            "NVIDIA H100 80GB HBM3",
            84_978_434_048,
            3.35232e12,
            9.89e14,
            {"cores": 132, "fpus": 128, "l2": 52_428_800, "clock": 1.98, "major": 9}
            | {"shared_per_core": 233_472, "shared_optin": 232_448},
        ),
        _card(
            "a100",
            "NVIDIA A100-SXM4-80GB",
            84_987_740_160,
            2.039e12,
            3.12e14,
            {"cores": 108, "fpus": 64, "l2": 41_943_040, "clock": 1.41, "major": 8}
            | {"shared_per_core": 167_936, "shared_optin": 166_912},
        ),
        _card(
            "b200",
            "NVIDIA B200",
            191_510_921_216,
            8.0e12,
            2.25e15,
            {"cores": 148, "fpus": 128, "l2": 132_644_864, "clock": 1.965, "major": 10}
            | {"shared_per_core": 233_472, "shared_optin": 232_448},
        ),
    )
}
"""Every known chip and card by its name."""


@dataclass(frozen=True)
class Topology:
    """Chips as they are wired.

    Attributes:
        chip: their kind.
        shape: chips along each axis; None for one chip.
    """

    chip: Chip
    shape: tuple[int, ...] | None

    def __str__(self) -> str:
        return self.chip.name if self.shape is None else f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def devices(self) -> int:
        """JAX devices of a program: those of one chip count as one, since a program without a mesh runs on one."""
        return 1 if self.shape is None else prod(self.shape) * self.chip.devices

    @property
    def compiler_name(self) -> str:
        """As the compiler calls it."""
        shape = self.chip.smallest if self.shape is None else "x".join(map(str, self.shape))
        return f"{self.chip.compiler_name}:{shape}"


def topology(name: str) -> Topology:
    """The topology of a name: `v6e` (one chip), `v6e:2x4`, `v5p:2x2x1`, `h100`.

    Args:
        name: a chip of `CHIPS`, and the number of its chips along each axis of the wiring unless there is one.

    Raises:
        ValueError: an unknown chip (the known ones are named), or a shape that is none.

    Example:
        >>> topology("v6e:2x4").devices
        8
    """
    kind, colon, shape = name.lower().removeprefix("tpu-").partition(":")
    kind = {"v7x": "7x", "tpu7x": "7x", "v5litepod": "v5e"}.get(kind, kind)
    check_name("plan", "topology", kind, CHIPS)
    chip = CHIPS[kind]
    if not colon:
        return Topology(chip, None)
    axes = chip.smallest.count("x") + 1
    example = f"{kind}:{chip.smallest}" if chip.smallest else kind
    if chip.platform != "tpu" or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) or shape.count("x") + 1 != axes:
        needed = f"chips along {axes} axes" if chip.platform == "tpu" else "one card"
        raise ValueError(f"plan: topology={name!r}: a topology of {kind} gives {needed}, such as {example!r}")
    chips = tuple(int(n) for n in shape.split("x"))
    return Topology(chip, None if prod(chips) == 1 else chips)
