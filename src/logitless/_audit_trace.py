"""The walk of `audit` through a jaxpr and all its sub-jaxprs: which arrays it makes, with which axes, on which line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import source_info_util
from jax.interpreters import partial_eval

from logitless._audit_axes import Axes, Kinds, Root, Sizes, Value, reshape_groups, tie_values

# The same buffer under another shape or name: no new array.
VIEWS = {"reshape", "squeeze", "expand_dims", "stop_gradient", "sharding_constraint", "optimization_barrier", "name"}
VIEWS |= {"pvary", "pcast", "copy_p"}
# Operations that write into their first operand: an allowed output and the array it was built in are one buffer.
BUFFERS = VIEWS | {"dynamic_update_slice", "scatter", "scatter-add"}
# Operations that change sizes but keep every axis in its place.
POSITIONAL = {"slice", "dynamic_slice", "dynamic_update_slice", "pad", "concatenate", "split", "top_k", "sort"}
POSITIONAL |= {"all_gather", "reduce_scatter", "all_to_all", "reduce_window_max", "reduce_window_sum", "reduce_window"}


@dataclass(frozen=True)
class Made:
    """One array that an equation makes."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: object
    primitive: str
    source: str
    shards: tuple[tuple[int, tuple[str, ...]], ...]
    mesh: tuple[tuple[str, int], ...]
    is_output: bool

    def fair_share(self, kinds: Kinds, elements: int) -> float:
        """Of N * V elements, the part one device holds inside the enclosing shard_map."""
        names = {name for axis, names in self.shards if not kinds.is_feature(axis) for name in names}
        return elements / math.prod(size for name, size in self.mesh if name in names)


def open_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """The jaxpr and its constants, of a closed or an open one."""
    return getattr(jaxpr, "jaxpr", jaxpr), list(getattr(jaxpr, "consts", ()))


def eliminate_dead_code(jaxpr: Any) -> Any:
    """The jaxpr without the equations that no output needs, its arguments kept."""
    live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return live


def source_line(eqn: Any, inherited: str) -> str:
    """The `file:line` of the innermost frame outside JAX, or that of the enclosing call."""
    found = re.match(r"(.+?:\d+)", source_info_util.summarize(eqn.source_info))
    return found.group(1) if found else inherited


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(open_jaxpr(value)[0], "eqns")


class Walk:
    """Ties axes along a jaxpr and collects the arrays of at least `floor` elements."""

    def __init__(self, sizes: Sizes, elements: int) -> None:
        self.axes, self.sizes, self.elements = Axes(), sizes, elements
        self.made: list[Made] = []
        self.roots: list[Root] = []
        self.opaque: list[tuple[list[Value], Value]] = []
        self._mesh: dict[str, int] = {}
        self._shards: list[tuple[int, tuple[str, ...]]] = []

    def root(self, aval: Any) -> Value:
        """An argument or constant."""
        shape = tuple(getattr(aval, "shape", ()))
        value = Value(shape, self.axes.fresh(shape), is_argument=True)
        self.roots.append(Root(shape, tuple(value.axes), getattr(aval, "dtype", None)))
        return value

    def jaxpr(self, jaxpr: Any, arguments: Sequence[Value], source: str, buffers: Sequence[bool]) -> list[Value]:
        """Walk one (open or closed) jaxpr; `buffers` marks the outputs that live in a caller's allowed buffer."""
        inner, _ = open_jaxpr(jaxpr)
        constants = [self.root(var.aval) for var in inner.constvars]
        return self.open_jaxpr(inner, arguments, constants, source, buffers)

    def open_jaxpr(
        self, inner: Any, arguments: Sequence[Value], constants: Sequence[Value], source: str, buffers: Sequence[bool]
    ) -> list[Value]:
        """Walk a jaxpr whose constants have been made roots already."""
        env: dict[Any, Value] = dict(zip(inner.invars, arguments, strict=True))
        env.update(zip(inner.constvars, constants, strict=True))
        allowed = self._buffers(inner, buffers)
        for eqn in inner.eqns:
            values = [self._read(env, atom) for atom in eqn.invars]
            flags = [var in allowed for var in eqn.outvars]
            outputs = self._equation(eqn, values, source_line(eqn, source), flags)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [self._read(env, atom) for atom in inner.outvars]

    def _read(self, env: dict[Any, Value], atom: Any) -> Value:
        if hasattr(atom, "val"):
            return Value(_shape(atom), self.axes.fresh(_shape(atom)))
        return env.setdefault(atom, Value(_shape(atom), self.axes.fresh(_shape(atom))))

    @staticmethod
    def _buffers(jaxpr: Any, buffers: Sequence[bool]) -> set[Any]:
        """The variables that share memory with an allowed output, found backwards."""
        allowed = {var for var, flag in zip(jaxpr.outvars, buffers, strict=True) if flag and not hasattr(var, "val")}
        for eqn in reversed(jaxpr.eqns):
            if not allowed.intersection(eqn.outvars):
                continue
            numel = max(math.prod(_shape(var)) for var in eqn.outvars if var in allowed)
            passes_on = eqn.primitive.name in BUFFERS or any(map(_is_jaxpr, eqn.params.values()))
            for atom in eqn.invars[: None if eqn.primitive.name in {"scan", "while"} else 1]:
                if passes_on and not hasattr(atom, "val") and math.prod(_shape(atom)) >= numel:
                    allowed.add(atom)
        return allowed

    def _equation(self, eqn: Any, values: list[Value], source: str, flags: list[bool]) -> list[Value]:
        name = eqn.primitive.name
        handler = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
            "shard_map": self._shard_map,
        }.get(name)
        outputs = [Value(_shape(var), self.axes.fresh(_shape(var))) for var in eqn.outvars]
        if handler is not None:
            handler(eqn, values, outputs, source, flags)
            return outputs
        if name == "pallas_call":
            # Blocks inside the kernel live in VMEM; only what the call returns is an array.
            self._opaque(eqn, values, outputs)
        elif not name.startswith("scatter"):
            called = [p for p in eqn.params.values() if _is_jaxpr(p)]
            for sub in called:
                if self._call(sub, values, outputs, source, flags):
                    return outputs
        if name != "pallas_call":
            _tie_equation(self, eqn, values, outputs)
        for var, value, flag in zip(eqn.outvars, outputs, flags, strict=True):
            if name in VIEWS and values and values[0].is_argument:
                value.is_argument = True
            else:
                self._record(var.aval, value, name, source, flag)
        return outputs

    def _record(self, aval: Any, value: Value, primitive: str, source: str, flag: bool) -> None:
        floor = self.elements / (2 * math.prod(self._mesh.values()))
        if math.prod(value.shape) >= floor and value.shape:
            dtype = getattr(aval, "dtype", None)
            shards, mesh = tuple(self._shards), tuple(self._mesh.items())
            self.made.append(Made(value.shape, tuple(value.axes), dtype, primitive, source, shards, mesh, flag))

    def _call(self, sub: Any, values: list[Value], outputs: list[Value], source: str, flags: list[bool]) -> bool:
        inner, _ = open_jaxpr(sub)
        if len(inner.invars) != len(values) or len(inner.outvars) != len(outputs):
            # A jaxpr that is called some other way: its arrays still count, judged by their sizes.
            loose = [Value(_shape(var), self.axes.fresh(_shape(var))) for var in inner.invars]
            self.jaxpr(sub, loose, source, [False] * len(inner.outvars))
            return False
        for output, result in zip(outputs, self.jaxpr(sub, values, source, flags), strict=True):
            tie_values(self.axes, output, result)
            output.is_argument = result.is_argument
        return True

    def _scan(self, eqn: Any, values: list[Value], outputs: list[Value], source: str, flags: list[bool]) -> None:
        body, _ = open_jaxpr(eqn.params["jaxpr"])
        # The slices of xs and the pieces of ys lack the leading axis; the rest are constants and carries.
        inside = [len(_shape(var)) for var in body.invars]
        inside_out = [len(_shape(var)) for var in body.outvars]
        xs = [rank < len(value.shape) for rank, value in zip(inside, values, strict=True)]
        ys = [rank < len(value.shape) for rank, value in zip(inside_out, outputs, strict=True)]
        num_carry = ys.count(False)
        first_carry = xs.count(False) - num_carry
        steps = [v.axes[0] for v, scanned in [*zip(values, xs, strict=True), *zip(outputs, ys, strict=True)] if scanned]
        for axis in steps[1:]:
            self.axes.tie(axis, steps[0])
        arguments = []
        for i, (value, scanned) in enumerate(zip(values, xs, strict=True)):
            start = 1 if scanned else 0
            arguments.append(Value(value.shape[start:], value.axes[start:], value.is_argument and i < first_carry))
        results = self.jaxpr(eqn.params["jaxpr"], arguments, source, flags)
        for i, (output, result, stacked) in enumerate(zip(outputs, results, ys, strict=True)):
            part = Value(output.shape[1:], output.axes[1:]) if stacked else output
            tie_values(self.axes, part, result)
            if stacked:
                self._record(eqn.outvars[i].aval, output, "scan", source, flags[i])
            else:
                tie_values(self.axes, values[first_carry + i], result)

    def _while(self, eqn: Any, values: list[Value], outputs: list[Value], source: str, flags: list[bool]) -> None:
        num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carries = [Value(v.shape, v.axes) for v in values[num_cond + num_body :]]
        self.jaxpr(eqn.params["cond_jaxpr"], values[:num_cond] + carries, source, [False])
        results = self.jaxpr(eqn.params["body_jaxpr"], values[num_cond : num_cond + num_body] + carries, source, flags)
        for carry, output, result in zip(carries, outputs, results, strict=True):
            tie_values(self.axes, carry, result)
            tie_values(self.axes, output, result)

    def _cond(self, eqn: Any, values: list[Value], outputs: list[Value], source: str, flags: list[bool]) -> None:
        for branch in eqn.params["branches"]:
            for output, result in zip(outputs, self.jaxpr(branch, values[1:], source, flags), strict=True):
                tie_values(self.axes, output, result)

    def _shard_map(self, eqn: Any, values: list[Value], outputs: list[Value], source: str, flags: list[bool]) -> None:
        body, _ = open_jaxpr(eqn.params["jaxpr"])
        before = dict(self._mesh), list(self._shards)
        self._mesh.update((name, size) for name, size in eqn.params["mesh"].shape.items() if size > 1)
        self.sizes.shards |= _products(list(self._mesh.values()))
        arguments = []
        for value, var, spec in zip(values, body.invars, eqn.params["in_specs"], strict=True):
            local = Value(_shape(var), value.axes, value.is_argument)
            arguments.append(local)
            for axis, names in zip(value.axes, tuple(spec), strict=False):
                if names is not None:
                    self._shards.append((axis, names if isinstance(names, tuple) else (names,)))
        for output, result in zip(outputs, self.jaxpr(body, arguments, source, flags), strict=True):
            tie_values(self.axes, output, result)
        self._mesh, self._shards = before

    def _opaque(self, eqn: Any, values: list[Value], outputs: list[Value]) -> None:
        for first, second in eqn.params.get("input_output_aliases", ()):
            tie_values(self.axes, values[first], outputs[second])
        self.opaque.extend((values, output) for output in outputs)

    def settle_opaque(self) -> None:
        """Tie the outputs of calls that cannot be looked into by size, where only one class has that size."""
        for values, output in self.opaque:
            for axis, size in zip(output.axes, output.shape, strict=True):
                pairs = [(a, s) for value in values for a, s in zip(value.axes, value.shape, strict=True)]
                classes = {self.axes.find(a) for a, s in pairs if s == size and size > 1}
                if len(classes) == 1:
                    self.axes.tie(axis, classes.pop())


def _products(sizes: list[int]) -> set[int]:
    found = {1}
    for size in sizes:
        found |= {size * other for other in found}
    return found


def _tie_equation(walk: Walk, eqn: Any, values: list[Value], outputs: list[Value]) -> None:
    """The rule of each primitive for which of its axes are the same."""
    name, params = eqn.primitive.name, eqn.params
    if not outputs or name == "iota":
        return
    if name.startswith("scatter") and "dimension_numbers" in params:
        rule = _tie_scatter
    elif name.startswith("reduce_") and "axes" in params:
        rule = _tie_reduction
    else:
        rule = _RULES.get(name)
    if rule is None:
        _tie_positions(walk, name, values, outputs)
    else:
        rule(walk.axes, params, values, outputs)


def _tie_positions(walk: Walk, name: str, values: list[Value], outputs: list[Value]) -> None:
    """Elementwise, slicing, padding, sorting and the like: position by position."""
    if len(values) == len(outputs) > 1 and name != "sort":
        for value, output in zip(values, outputs, strict=True):
            tie_values(walk.axes, value, output)
        return
    tied = [value for value in values if value.shape and len(value.shape) == len(outputs[0].shape)]
    for output in outputs:
        fits = all(a in (1, b) for v in tied for a, b in zip(v.shape, output.shape, strict=False))
        if tied and (name in POSITIONAL or fits) and "dot" not in name and "conv_" not in name:
            for value in tied:
                tie_values(walk.axes, value, output)
        elif output.shape:
            walk.opaque.append((values, output))


def _tie_dot(axes: Axes, params: Any, values: list[Value], outputs: list[Value]) -> None:
    (left_contract, right_contract), (left_batch, right_batch) = params["dimension_numbers"]
    (left, right), (out,) = values, outputs
    for a, b in [*zip(left_contract, right_contract, strict=True), *zip(left_batch, right_batch, strict=True)]:
        if left.shape[a] > 1:
            axes.tie(left.axes[a], right.axes[b])
    kept = [left.axes[i] for i in left_batch]
    kept += [a for i, a in enumerate(left.axes) if i not in {*left_contract, *left_batch}]
    kept += [a for i, a in enumerate(right.axes) if i not in {*right_contract, *right_batch}]
    for position, axis in enumerate(kept):
        if out.shape[position] > 1:
            axes.tie(out.axes[position], axis)


def _tie_transpose(axes: Axes, params: Any, values: list[Value], outputs: list[Value]) -> None:
    for position, origin in enumerate(params["permutation"]):
        axes.tie(outputs[0].axes[position], values[0].axes[origin])


def _tie_broadcast(axes: Axes, params: Any, values: list[Value], outputs: list[Value]) -> None:
    for origin, position in enumerate(params["broadcast_dimensions"]):
        if values[0].shape[origin] > 1:
            axes.tie(outputs[0].axes[position], values[0].axes[origin])


def _tie_all_gather(axes: Axes, params: Any, values: list[Value], outputs: list[Value]) -> None:
    for value, out in zip(values, outputs, strict=True):
        if len(out.shape) == len(value.shape):
            tie_values(axes, value, out)
            continue
        kept = [a for i, a in enumerate(out.axes) if i != params["all_gather_dimension"]]
        for new, old in zip(kept, value.axes, strict=True):
            axes.tie(new, old)


def _tie_reshape(axes: Axes, params: Any, values: list[Value], outputs: list[Value]) -> None:
    value, out = values[0], outputs[0]
    for old, new in reshape_groups(value.shape, out.shape):
        if len(old) == len(new) == 1:
            axes.tie(value.axes[old[0]], out.axes[new[0]])
        elif len(new) == 1:
            axes.merge(out.axes[new[0]], [value.axes[i] for i in old])
        elif len(old) == 1:
            axes.merge(value.axes[old[0]], [out.axes[i] for i in new])
        else:
            (between,) = axes.fresh([1])
            axes.merge(between, [value.axes[i] for i in old])
            axes.merge(between, [out.axes[i] for i in new])


def _tie_reduction(axes: Axes, params: Any, values: list[Value], outputs: list[Value]) -> None:
    reduced = params.get("axes", params.get("dimensions", ()))
    for value, out in zip(values, outputs, strict=False):
        kept = [i for i in range(len(value.shape)) if i not in {r % len(value.shape) for r in reduced}]
        for position, origin in enumerate(kept):
            if value.shape[origin] > 1:
                axes.tie(out.axes[position], value.axes[origin])


def _tie_gather(axes: Axes, params: Any, values: list[Value], outputs: list[Value]) -> None:
    numbers, (operand, indices, *_), out = params["dimension_numbers"], values, outputs[0]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window = [i for i in range(len(operand.shape)) if i not in gone]
    for position, origin in zip(numbers.offset_dims, window, strict=True):
        if out.shape[position] > 1:
            axes.tie(out.axes[position], operand.axes[origin])
    batch = [i for i in range(len(out.shape)) if i not in numbers.offset_dims]
    for position, axis in zip(batch, indices.axes[:-1], strict=True):
        if out.shape[position] > 1:
            axes.tie(out.axes[position], axis)
    for a, b in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        if operand.shape[a] > 1:
            axes.tie(operand.axes[a], indices.axes[b])


def _tie_scatter(axes: Axes, params: Any, values: list[Value], outputs: list[Value]) -> None:
    numbers, (operand, indices, updates) = params["dimension_numbers"], values
    tie_values(axes, operand, outputs[0])
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = [i for i in range(len(operand.shape)) if i not in gone]
    for position, origin in zip(numbers.update_window_dims, window, strict=True):
        if updates.shape[position] > 1 and operand.shape[origin] > 1:
            axes.tie(updates.axes[position], operand.axes[origin])
    batch = [i for i in range(len(updates.shape)) if i not in numbers.update_window_dims]
    for position, axis in zip(batch, indices.axes[:-1], strict=True):
        if updates.shape[position] > 1:
            axes.tie(updates.axes[position], axis)
    for a, b in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        if operand.shape[a] > 1:
            axes.tie(operand.axes[a], indices.axes[b])


_RULES: dict[str, Callable[[Axes, Any, list[Value], list[Value]], None]] = {
    "all_gather": _tie_all_gather,
    "argmax": _tie_reduction,
    "argmin": _tie_reduction,
    "broadcast_in_dim": _tie_broadcast,
    "dot_general": _tie_dot,
    "gather": _tie_gather,
    "reduce": _tie_reduction,
    "reshape": _tie_reshape,
    "squeeze": _tie_reduction,
    "transpose": _tie_transpose,
}
