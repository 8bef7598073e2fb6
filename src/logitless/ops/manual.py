"""Inside a caller's own `shard_map`: over which axes it runs, and of what type its values are there.

By default (`check_vma=True`) JAX types each value by the axes over which it varies between devices, and a loop's carry
must enter with the type with which it comes out.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, ManualAxisType, Mesh, get_abstract_mesh

Axes = tuple[str, ...]
T = TypeVar("T")


def manual_axes() -> Axes:
    """Axes of the mesh in scope over which a `shard_map` runs."""
    return axes_of_type(get_abstract_mesh(), AxisType.Manual)


def not_manual(axes: Axes) -> Axes:
    """Those over which no `shard_map` of the caller runs already."""
    manual = manual_axes()
    return tuple(axis for axis in axes if axis not in manual)


def axes_of_type(mesh: Mesh | AbstractMesh, wanted: AxisType) -> Axes:
    """Axes of a mesh that are automatic, explicit or manual."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == wanted)


def varying_axes(*values: Any) -> frozenset[str]:
    """Axes over which any of the values varies; none outside `shard_map`, or where it does not check."""
    return frozenset().union(*(_varying(jax.typeof(x)) for x in jax.tree.leaves(values)))


def _varying(aval: Any) -> frozenset[str]:
    return aval.manual_axis_type.varying


def varying(x: T, axes: Axes | frozenset[str]) -> T:
    """The values, typed as varying over those of the axes that are manual. Its transpose is a sum over them."""
    manual = manual_axes()

    def cast(leaf: Any) -> Any:
        more = tuple(axis for axis in manual if axis in axes and axis not in _varying(jax.typeof(leaf)))
        return lax.pcast(leaf, more, to="varying") if more else leaf

    return jax.tree.map(cast, x)


def shapes_of_kernel(shapes: T, *args: Any) -> T:
    """Shapes of a kernel's results, typed as varying as its arguments do: nothing of it does by itself."""
    if not manual_axes():
        return shapes
    kind = ManualAxisType(varying=varying_axes(*args))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=kind), shapes)


def fori_loop(lower: Any, upper: Any, body: Callable[[Any, T], T], init: T) -> T:
    """`lax.fori_loop` of a carry that enters with the type with which it comes out."""
    if manual_axes():
        while True:
            out = jax.make_jaxpr(body)(lower, init).out_avals
            leaves, tree = jax.tree.flatten(init)
            wider = [varying(x, _varying(aval)) for x, aval in zip(leaves, out, strict=True)]
            if all(varying_axes(x) == varying_axes(y) for x, y in zip(wider, leaves, strict=True)):
                break
            init = jax.tree.unflatten(tree, wider)
    return lax.fori_loop(lower, upper, body, init)
