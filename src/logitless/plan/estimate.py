"""Time, products and traffic of a compiled program: the compiler's estimates in its text, times how often each runs."""

import re
from dataclasses import dataclass, field
from math import prod

import numpy as np

from logitless.plan.hlo import Instruction, Module, item_bytes
from logitless.plan.loops import Place, trip_count, value_of
from logitless.plan.program import MOSAIC

_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_SCATTERED = "all-reduce-scatter"
_MOVES = ("copy", "slice", "dynamic-slice", "pad", "concatenate", "transpose", "bitcast", "reshape", "reverse")
_NO_WORK = ("parameter", "constant", "tuple", "get-tuple-element")


@dataclass
class KernelCall:
    """A Mosaic kernel in the program.

    Attributes:
        runs: how often it is called.
        steps: of the dynamic axes of its grid, which come first among its operands: the most that the program tells;
            None where it tells nothing.
    """

    runs: float
    steps: tuple[int | None, ...]


@dataclass
class Estimate:
    """Sums over one run of a program on one device.

    Attributes:
        cycles: estimated by XLA for what it compiles itself; Mosaic kernels have none here.
        flops: of the products, two for each multiplication and addition.
        collective_bytes: that the device receives in collectives.
        copy_cycles: of `cycles`, what only copies arrays or pieces of them.
        copy_bytes: read and written by that.
        kernels: the Mosaic kernels by the name of their instruction.
        bounded: loops whose end is known at run time, counted with the most that they can run.
        unknown: loops of unknown length, counted once, and conditionals of which the longest branch is counted.
    """

    cycles: float = 0.0
    flops: float = 0.0
    collective_bytes: float = 0.0
    copy_cycles: float = 0.0
    copy_bytes: float = 0.0
    kernels: dict[str, KernelCall] = field(default_factory=dict)
    bounded: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def add(self, other: "Estimate", times: float = 1.0) -> None:
        """Adds `other`, run `times` times."""
        self.cycles += times * other.cycles
        self.flops += times * other.flops
        self.collective_bytes += times * other.collective_bytes
        self.copy_cycles += times * other.copy_cycles
        self.copy_bytes += times * other.copy_bytes
        self.kernels |= {name: KernelCall(call.runs * times, call.steps) for name, call in other.kernels.items()}
        self.bounded += other.bounded
        self.unknown += other.unknown


def estimate(module: Module) -> Estimate:
    """The sums of a program."""
    return _of_computation(module, Place(module.computations[module.entry]))


def _of_computation(module: Module, place: Place) -> Estimate:
    total = Estimate()
    for x in place.computation:
        total.cycles += x.cycles or 0
        if x.cycles is not None and _only_copies(module, x):
            total.copy_cycles += x.cycles
            total.copy_bytes += 2 * x.bytes
        if x.op == "while":
            _add_loop(module, x, place, total)
        elif x.op == "conditional":
            branches = [_of_computation(module, Place(module.computations[name], (x, place))) for name in x.branches]
            # A kernel has cycles of its own, which stand elsewhere.
            total.add(max(branches, key=lambda branch: (bool(branch.kernels), branch.cycles, branch.flops)))
            total.unknown.append(f"conditional {x.name} ({_where(x)}): its longest branch is counted")
        elif x.op in ("fusion", "call", "async-start"):
            total.add(_of_called(module, x, place))
        elif x.op in ("dot", "convolution"):
            total.flops += _flops(x, place)
        elif x.op == "custom-call" and f'custom_call_target="{MOSAIC}"' in x.rest:
            total.kernels[x.name] = KernelCall(1.0, _dynamic_steps(module, x, place))
        elif x.op.removesuffix("-start") in _COLLECTIVES:
            total.collective_bytes += _collective_bytes(x, place, module.devices)
    return total


def _of_called(module: Module, x: Instruction, place: Place) -> Estimate:
    called = Place(module.callee(x, "to_apply" if x.op == "call" else "calls"), (x, place))
    inside = _of_computation(module, called)
    if x.cycles is not None:
        # Those of a fusion are its own, whatever stands inside.
        inside.cycles = 0.0
    if called.computation.name.startswith(_SCATTERED):
        # Of a sum that is then cut, which a TPU does as one, each device receives its own part.
        inside.collective_bytes /= 2
    return inside


def _add_loop(module: Module, loop: Instruction, place: Place, total: Estimate) -> None:
    trips = trip_count(module, loop, place)
    if trips is None:
        total.unknown.append(f"loop {loop.name} ({_where(loop)}): of unknown length, counted once")
    elif not trips.exact:
        total.bounded.append(f"{_where(loop)}: at most {trips.number} times")
    times = 1.0 if trips is None else float(trips.number)
    for attribute in ("body", "condition"):
        total.add(_of_computation(module, Place(module.callee(loop, attribute), (loop, place))), times)


def _only_copies(module: Module, x: Instruction) -> bool:
    """Whether an instruction, or all that a fusion does, is to copy arrays or pieces of them."""
    ops = {inner.op for inner in module.callee(x, "calls")} - set(_NO_WORK) if x.op == "fusion" else {x.op}
    return bool(ops) and ops <= set(_MOVES)


def _dynamic_steps(module: Module, kernel: Instruction, place: Place) -> tuple[int | None, ...]:
    steps: list[int | None] = []
    for name in kernel.operands:
        if place[name].shapes != (("s32", ()),):
            break
        bound = value_of(module, place, name)
        steps.append(None if bound is None else bound.number)
    return tuple(steps)


def _flops(x: Instruction, place: Place) -> float:
    """Of a product, which XLA for TPU writes as a convolution: a batch is then a window of which one tap meets data."""
    left, right = (place[name].shapes[0][1] for name in x.operands[:2])
    out = x.shapes[0][1]
    if x.op == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", x.rest)
        places = [int(i) for i in contracted[1].split(",") if i] if contracted else []
        return 2.0 * prod(out) * prod(left[i] for i in places)
    of_left, of_right, of_out = re.split("_|->", x.attribute("dim_labels") or "bf_io->bf")
    flops = 2.0 * prod(out) * right[of_right.index("i")]
    for axis in range(len(of_left) - 2):
        steps = out[of_out.index(str(axis))]
        flops *= _taps(x.rest, axis, left[of_left.index(str(axis))], steps) / steps
    return flops


def _taps(text: str, axis: int, size: int, steps: int) -> int:
    """How many taps of a window meet data along an axis of `size`, over all of its steps."""
    window = re.search(r"window=\{([^}]*)\}", text)
    given = dict(part.split("=") for part in window[1].split()) if window else {}
    read = {key: value.split("x")[axis] for key, value in given.items()}
    width, stride = int(read.get("size", 1)), int(read.get("stride", 1))
    left_dilation, right_dilation = int(read.get("lhs_dilate", 1)), int(read.get("rhs_dilate", 1))
    before = int(read.get("pad", "0_0").split("_")[0])
    places = np.arange(steps)[:, None] * stride + np.arange(width) * right_dilation - before
    meets = (places % left_dilation == 0) & (places >= 0) & (places < size * left_dilation)
    return int(meets.sum())


def _collective_bytes(x: Instruction, place: Place, devices: int | None) -> float:
    """That a device receives in a collective, by the rings that bring the fewest."""
    op = x.op.removesuffix("-start")
    taken = sum((place[name].bytes for name in x.operands if name in place.computation.instructions), 0.0)
    brought = _brought(x)
    if op == "collective-permute":
        return brought
    # A sum leaves in a narrower dtype at times: what travels is what is added.
    whole = {"all-reduce": 2 * max(taken, brought), "reduce-scatter": taken}.get(op, brought)
    group = _group_size(x.rest) or devices
    return whole if group is None else whole * (group - 1) / group


def _brought(x: Instruction) -> float:
    """Of the result; the start of most asynchronous collectives names what it takes first."""
    if not x.op.endswith("-start") or x.op == "all-reduce-start":
        return x.bytes
    arrays = [(dtype, dims) for dtype, dims in x.shapes if dims]
    return sum((item_bytes(dtype) * prod(dims) for dtype, dims in arrays[len(arrays) // 2 :]), 0.0)


def _group_size(text: str) -> int | None:
    """Devices of a group, which stands as `{{0,2},{1,3}}`, `[2,4]<=[8]` or axes of a mesh; None where all are one."""
    found = re.search(
        r"replica_groups=(\{\{(?P<list>[\d,]+)\}|\[(?P<iota>[\d,]+)\]|mesh\[(?P<mesh>[^\]]*)\] ?\{(?P<axes>[^}]*)\})",
        text,
    )
    if found is None:
        return None
    if found["list"] is not None:
        return len(found["list"].split(","))
    if found["iota"] is not None:
        return int(found["iota"].split(",")[1])
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found["mesh"])}
    return prod(sizes[name] for name in re.findall(r"'(\w+)'", found["axes"]))


def _where(x: Instruction) -> str:
    """The innermost named function that it comes from."""
    names = re.findall(r"jit\((\w+)\)", x.source)
    return names[-1] if names else x.source.rsplit("/", 1)[-1] or "no source"
