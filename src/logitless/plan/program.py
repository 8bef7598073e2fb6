"""A function and the shapes of its arguments as a program that another process can compile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding

from logitless._arrays import tracing_for
from logitless.plan.chips import Topology

MOSAIC = "tpu_custom_call"
"""What XLA calls a Pallas kernel for a TPU."""


@dataclass(frozen=True)
class Program:
    """A program as it goes to the compiler.

    Attributes:
        content: what `jax.export` writes.
        mesh: names and sizes of the axes, None for one device.
        donated: places of the flat arguments that the program may overwrite.
        has_kernels: whether it calls Mosaic kernels, whose schedules the compiler then writes out.
    """

    content: bytes
    mesh: tuple[tuple[str, int], ...] | None
    donated: tuple[int, ...]
    has_kernels: bool


def export_program(
    fn: Callable[..., Any], args: Sequence[Any], where: Topology, donate_argnums: Sequence[int] = ()
) -> Program:
    """Traces and lowers `fn` for a chip that is not here; nothing is run or compiled.

    Raises:
        ValueError: a mesh among the arguments that has not as many devices as the topology.
    """
    args = tuple(jax.tree.map(_abstract, tuple(args)))
    meshes = {x.sharding.mesh for x in jax.tree.leaves(args) if isinstance(x.sharding, NamedSharding)}
    mesh = _one_mesh(meshes, where)
    device = AbstractDevice(
        device_kind=where.chip.device_kind, num_cores=where.chip.cores, platform=where.chip.platform
    )
    # Without axes, so that it stands in the way of no mesh of the function's own.
    here = jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    with here, tracing_for(where.chip.platform):
        exported = jax.export.export(jax.jit(fn), platforms=[where.chip.platform])(*args)
    return Program(
        content=bytes(exported.serialize()),
        mesh=None if mesh is None else tuple(zip(mesh.axis_names, mesh.axis_sizes, strict=True)),
        donated=_flat_places(args, donate_argnums),
        has_kernels=MOSAIC in exported.mlir_module(),
    )


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    x = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    sharding = getattr(x, "sharding", None)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if isinstance(sharding, NamedSharding) else None)


def _one_mesh(meshes: set[Any], where: Topology) -> Any:
    """The mesh of the arguments, None where they have none."""
    meshes = {mesh for mesh in meshes if not mesh.empty}
    if len({(mesh.axis_names, mesh.axis_sizes) for mesh in meshes}) > 1:
        raise ValueError(f"plan: arguments over {len(meshes)} different meshes; give all of them one")
    if not meshes:
        if where.shape is not None:
            raise ValueError(
                f"plan: topology {where} has {where.devices} devices, but no argument is sharded; give arguments with "
                f"NamedSharding(AbstractMesh(...), ...), or one chip: topology={where.chip.name!r}"
            )
        return None
    mesh = meshes.pop()
    if mesh.size != where.devices:
        axes = ", ".join(f"{name}={n}" for name, n in zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        raise ValueError(
            f"plan: a mesh of {mesh.size} devices ({axes}), topology {where} of {where.devices}; they must be as many"
        )
    return mesh


def _flat_places(args: tuple[Any, ...], argnums: Sequence[int]) -> tuple[int, ...]:
    """The flat places of the arguments `argnums`."""
    places, start = [], 0
    for i, argument in enumerate(args):
        count = len(jax.tree.leaves(argument))
        places += range(start, start + count) if i in argnums else ()
        start += count
    return tuple(places)
