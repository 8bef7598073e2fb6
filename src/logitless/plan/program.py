"""A function and the shapes of its arguments as a program that another process can compile."""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
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
        identity: a hash of it without the source lines that it comes from, those inside Pallas kernels aside.
        mesh: name, size and type of each axis, None for one device.
        donated: places of the flat arguments that the program may overwrite.
        has_kernels: whether it calls Mosaic kernels, whose schedules the compiler then writes out.
    """

    content: bytes
    identity: str
    mesh: tuple[tuple[str, int, str], ...] | None
    donated: tuple[int, ...]
    has_kernels: bool


class LoweringFailed(Exception):
    """JAX cannot lower a function for a chip: `str(error)` says why in a line."""


def export_program(
    fn: Callable[..., Any], args: Sequence[Any], where: Topology, donate_argnums: int | Sequence[int] = ()
) -> Program:
    """Traces and lowers `fn` for a chip that is not here; nothing is run or compiled.

    Raises:
        ValueError: a mesh among the arguments that has not as many devices as the topology; a donated argument that is
            not there. Whatever `fn` raises when it is traced.
        LoweringFailed: the chip has no such operation, or a kernel no such form.
    """
    args = tuple(jax.tree.map(_abstract, tuple(args)))
    leaves, tree = jax.tree.flatten(args)
    mesh = _one_mesh({x.sharding.mesh for x in leaves if isinstance(x.sharding, NamedSharding)}, where)
    donated = _flat_places(args, donate_argnums)
    device = AbstractDevice(
        device_kind=where.chip.device_kind, num_cores=where.chip.cores, platform=where.chip.platform
    )

    # Flat on both sides: a tree of the caller's own classes could not be written to a file.
    @jax.jit
    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(fn(*jax.tree.unflatten(tree, leaves)))

    # Without axes, so that it stands in the way of no mesh of the function's own.
    here = jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    with here, tracing_for(where.chip.platform, where.chip.device_kind):
        flat.trace(*leaves)
        try:
            exported = jax.export.export(flat, platforms=[where.chip.platform])(*leaves)
        except (ValueError, NotImplementedError) as error:
            raise LoweringFailed(f"not lowered for {where.chip.name}: {' '.join(str(error).split())[:400]}") from error
    text = exported.mlir_module()
    return Program(
        content=bytes(exported.serialize()),
        identity=_identity(text, exported),
        mesh=None if mesh is None else tuple(_axes(mesh)),
        donated=donated,
        has_kernels=MOSAIC in text,
    )


_SOURCE_LINES = re.compile(r'^#loc.*$|\s*\bloc\((?:#\w+|"[^"]*"|unknown)\)', re.MULTILINE)


def _identity(text: str, exported: jax.export.Exported) -> str:
    parts = (_SOURCE_LINES.sub("", text), str(exported.in_avals), str(exported.module_kept_var_idx))
    parts += (str(exported.in_shardings_hlo), str(exported.out_shardings_hlo))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _axes(mesh: Any) -> Iterator[tuple[str, int, str]]:
    for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True):
        yield name, size, kind.name


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    x = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    sharding = getattr(x, "sharding", None)
    # A Python number stays one: it gives way to the dtype that it meets.
    return jax.ShapeDtypeStruct(
        x.shape,
        x.dtype,
        sharding=sharding if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None,
        weak_type=getattr(x, "weak_type", False),
    )


def _one_mesh(meshes: set[Any], where: Topology) -> Any:
    """The mesh of the arguments, None where they have none."""
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


def _flat_places(args: tuple[Any, ...], argnums: int | Sequence[int]) -> tuple[int, ...]:
    """The flat places of the arguments `argnums`, which count from the end where they are negative."""
    argnums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if wrong := [i for i in argnums if not -len(args) <= i < len(args)]:
        raise ValueError(f"plan: donate_argnums names argument {wrong[0]}; there are {len(args)}")
    wanted = {i % len(args) for i in argnums}
    places, start = [], 0
    for i, argument in enumerate(args):
        count = len(jax.tree.leaves(argument))
        places += range(start, start + count) if i in wanted else ()
        start += count
    return tuple(places)
