"""The `sharding:` section of a config: a mesh, and what of tokens and vocabulary its axes split."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from logitless.bench.errors import BenchError
from logitless.ops.head_sharding import HeadSharding

COLLECTIVE_FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)
"""XLA ends a process whose virtual devices wait for each other longer than 40 s. On a few busy cores they do: eight
devices share the cores, and a kernel in JAX's simulation of a TPU takes a while on each."""


@dataclass(frozen=True)
class MeshSharding:
    """How tokens and head lie over a mesh of devices.

    Attributes:
        axes: of the mesh, slowest first: devices along each, by name.
        tokens: axes that split the first axis of the targets: sequences, or tokens where that is the only axis.
        vocab: axes that split the vocabulary of head, bias and logits.
        head: what travels where tokens and vocabulary share axes, as `HeadSharding` takes it.
    """

    axes: dict[str, int]
    tokens: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()
    head: Literal["auto", "gather_head", "gather_tokens"] = "auto"

    @property
    def size(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.axes.values())

    @property
    def token_spec(self) -> PartitionSpec:
        """Of the targets."""
        return PartitionSpec(self.tokens or None)

    @property
    def split(self) -> dict[str, tuple[str, ...]]:
        """Axes of the mesh by the key that names them."""
        return {"tokens": self.tokens, "vocab": self.vocab}

    def parts(self, axes: Sequence[str]) -> int:
        """Devices along some axes."""
        return math.prod(self.axes[axis] for axis in axes)

    def check(self, what: str, devices: int) -> None:
        """Raises BenchError, which begins with `what`, for a mesh that `devices` do not make or an axis it lacks."""
        mesh = ", ".join(f"{name}: {size}" for name, size in self.axes.items())
        if not self.axes or min(self.axes.values()) < 1:
            raise BenchError(f"{what}: axes is {{{mesh}}}; name at least one axis, with at least 1 device along each")
        if self.size != devices:
            raise BenchError(
                f"{what}: axes {{{mesh}}} make {self.size} devices, and the run has {devices}; change axes, or the "
                "number of devices that the run asks for"
            )
        for key, axes in self.split.items():
            for axis in axes:
                if axis not in self.axes:
                    raise BenchError(f"{what}: {key} names the axis {axis!r}, which axes {{{mesh}}} lack")
            if len(set(axes)) < len(axes):
                raise BenchError(f"{what}: {key} is [{', '.join(axes)}]; name an axis once")

    def mesh(self, devices: Sequence[Any]) -> Mesh:
        """Of the first devices, as many as the axes ask for, with axes that the compiler may use as it likes."""
        shape = tuple(self.axes.values())
        return Mesh(np.array(devices[: self.size], dtype=object).reshape(shape), tuple(self.axes))

    def abstract_mesh(self) -> AbstractMesh:
        """The same without devices, for programs of chips that are not here."""
        names = tuple(self.axes)
        # JAX 0.12 would take the axes of an abstract mesh as explicit, and those of a real one as automatic.
        return AbstractMesh(tuple(self.axes.values()), names, axis_types=(AxisType.Auto,) * len(names))

    def head_sharding(self, mesh: Mesh | AbstractMesh, vocab_size: int | None = None) -> HeadSharding:
        """What the ops take."""
        return HeadSharding(mesh, tokens=self.token_spec, vocab=self.vocab, vocab_size=vocab_size, head=self.head)


def start_devices(count: int) -> None:
    """Sees to it that JAX has `count` devices, before it has started any: on a CPU they are virtual ones.

    Raises:
        BenchError: JAX has fewer, for it has started already or runs on another platform.
    """
    if count == 1:
        return
    # XLA reads the environment when its first backend starts. Of a flag given twice the last counts: the user's.
    given = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join([*(flag for flag in COLLECTIVE_FLAGS if flag not in given), *given])
    # XLA has a thread for each device or core, whichever are more. Where each is inside a callback of a kernel in JAX's
    # simulation of a TPU, and that waits for one more to copy its array, none is left, and the run stands still.
    os.environ.setdefault("PJRT_NPROC", str(max(os.cpu_count() or 1, 2 * count)))
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        # JAX has started; whether it has enough devices is for the next line to see.
        pass
    found = jax.devices()
    if len(found) < count:
        raise BenchError(
            f"the run needs {count} devices, and JAX has started with {len(found)} ({found[0].platform}); run it in a "
            "process of its own with JAX_PLATFORMS=cpu, where they are virtual"
        )
