"""Does a function, or its gradient, hold a `[tokens, vocab]` array, as traced or as compiled?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

from logitless import _audit_hlo as hlo
from logitless._arrays import shape_error
from logitless._audit_axes import Kinds, Root, Sizes, tie_values
from logitless._audit_trace import Made, Walk, eliminate_dead_code, open_jaxpr

# The wrappers below are not where anybody's logits come from.
source_info_util.register_exclusion(__file__)

Where = Literal["forward", "gradient"]


@dataclass(frozen=True)
class Leak:
    """One array that spans tokens and vocabulary."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    primitive: str
    where: Where
    source: str

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.shape))
        megabytes = self.bytes / 2**20
        return f"{self.dtype}[{dims}]  {megabytes:,.1f} MiB  {self.primitive}  in the {self.where}  at {self.source}"


@dataclass(frozen=True)
class AuditReport:
    """What `audit` found. The byte counts are the compiled program's, the gradient's where there is one."""

    traced: tuple[Leak, ...]
    materialised: tuple[Leak, ...]
    temp_bytes: int | None
    output_bytes: int | None
    argument_bytes: int | None
    vocab_size: int
    num_tokens: int
    compiled: bool = True

    @property
    def ok(self) -> bool:
        """True when neither the traced nor the compiled program holds logits."""
        return not self.traced and not self.materialised

    def __str__(self) -> str:
        head = f"audit: N={self.num_tokens:,} tokens, V={self.vocab_size:,}"
        lines = [f"{head}: {'no' if self.ok else 'holds'} [tokens, vocab] array{'' if self.ok else 's'}"]
        for title, leaks in (("traced", self.traced), ("materialised", self.materialised)):
            if title == "materialised" and not self.compiled:
                lines.append("  materialised: not compiled")
                continue
            lines.append(f"  {title}: {len(leaks) or 'none'}")
            lines += [f"    {leak}" for leak in leaks]
        if self.temp_bytes is not None:
            lines.append(
                f"  memory: temporaries {self.temp_bytes:,} bytes, outputs {self.output_bytes:,} bytes, "
                f"arguments {self.argument_bytes:,} bytes"
            )
        return "\n".join(lines)


@dataclass
class _Program:
    """A function of a flat list of arrays, and which of its outputs and inputs have the same axes."""

    where: Where
    fn: Callable[..., Any]
    leaves: list[Any]
    num_cotangents: int = 0
    output_ties: list[tuple[int, int]] = field(default_factory=list)


def audit(
    fn: Callable[..., Any],
    *args: Any,
    vocab_size: int,
    num_tokens: int,
    differentiate: int | Sequence[int] | None = None,
    allow_outputs: bool = False,
    compile_program: bool = True,
) -> AuditReport:
    """Find every `[tokens, vocab]` array that a function or its gradient makes.

    Equal to tracing `fn` and its vjp, removing dead code, and looking in every sub-jaxpr for an array of at least
    `N * V / 2` elements that has a token and a vocabulary axis; then looking for the same in the compiled HLO.

    An array counts in whatever form: `[B, T, V]`, `[N * V]`, `[N, V / 128, 128]`, transposed, padded, one-hot, stacked
    by a scan, or one device's shard inside `shard_map`. Axes are followed from the arguments, so a `[D, V]` head or its
    gradient is none, also when D equals N. Where neither provenance nor sizes decide, the array counts.

    Arguments are never a leak. A function that takes the logits themselves and is differentiated with respect to them
    must return a gradient of their shape; `allow_outputs=True` says that this one array is meant.

    With N = 1 a row of logits is no larger than a bias, and none is reported.

    `traced` is what the program says on any device, before fusion; `materialised` is what this device's compiler left
    in memory. A one-hot that XLA fuses into a sum is in the first and not in the second.

    Args:
        fn: the function. Its result is differentiated if it is a scalar, by its first element if that is a scalar
            (a LossOutput), otherwise by all its floating-point outputs.
        *args: its arguments, pytrees of arrays or `jax.ShapeDtypeStruct`s. Other leaves (None, str, Python numbers)
            are passed as they are. Closed-over arrays count as arguments.
        vocab_size: V. A head that is padded to a multiple of up to 1,024, or by up to a tenth, is recognised.
        num_tokens: N = B * T, over all devices.
        differentiate: positions of the arguments to differentiate; None means every floating-point leaf, `()` none.
        allow_outputs: allow arrays that are returned and have an argument's shape and dtype.
        compile_program: False leaves `materialised` empty and the byte counts None, for programs that the device at
            hand cannot compile.

    Returns:
        The report; bytes are per device.

    Raises:
        ValueError: for sizes below 1, for positions that do not exist, and when no argument has a vocabulary axis.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def dense(hidden, lm_head):
        ...     return jax.nn.logsumexp(hidden @ lm_head, axis=-1)
        >>> def blocked(hidden, lm_head):
        ...     def step(lse, start):
        ...         block = jax.lax.dynamic_slice_in_dim(lm_head, start, 64, axis=1)
        ...         return jnp.logaddexp(lse, jax.nn.logsumexp(hidden @ block, axis=-1)), None
        ...     starts = jnp.arange(0, lm_head.shape[1], 64)
        ...     return jax.lax.scan(step, jnp.full(hidden.shape[0], -jnp.inf), starts)[0]
        >>> hidden = jax.ShapeDtypeStruct((32, 16), jnp.float32)
        >>> lm_head = jax.ShapeDtypeStruct((16, 512), jnp.float32)
        >>> options = dict(vocab_size=512, num_tokens=32, differentiate=())
        >>> audit(dense, hidden, lm_head, **options).traced[0].shape
        (32, 512)
        >>> audit(blocked, hidden, lm_head, **options).ok
        True

    Reference: none.
    """
    if vocab_size < 1 or num_tokens < 1:
        given = {"vocab_size": vocab_size, "num_tokens": num_tokens}
        raise shape_error("audit", given, "both must be at least 1: V of the LM head and N = B * T tokens")
    traced: list[Leak] = []
    materialised: list[Leak] = []
    memory: tuple[int | None, int | None, int | None] = (None, None, None)
    for program in _programs(fn, args, differentiate):
        judge = _trace(program, vocab_size, num_tokens, allow_outputs)
        traced += judge.traced_leaks()
        if compile_program:
            compiled = jax.jit(program.fn).lower(*program.leaves).compile()
            materialised += judge.materialised_leaks(compiled.as_text() or "")
            stats = compiled.memory_analysis()
            if stats is not None:
                memory = (stats.temp_size_in_bytes, stats.output_size_in_bytes, stats.argument_size_in_bytes)
    return AuditReport(
        tuple(dict.fromkeys(traced)),
        tuple(dict.fromkeys(materialised)),
        *memory,
        vocab_size,
        num_tokens,
        compile_program,
    )


def assert_logitless(
    fn: Callable[..., Any],
    *args: Any,
    vocab_size: int,
    num_tokens: int,
    differentiate: int | Sequence[int] | None = None,
    allow_outputs: bool = False,
    compile_program: bool = True,
    traced: bool = True,
) -> None:
    """Raise AssertionError if a function or its gradient holds a `[tokens, vocab]` array.

    Equal to `assert audit(fn, *args, vocab_size=V, num_tokens=N).ok`, with a message that names every array.

    Args:
        fn: as in `audit`.
        *args: as in `audit`.
        vocab_size: as in `audit`.
        num_tokens: as in `audit`.
        differentiate: as in `audit`.
        allow_outputs: as in `audit`.
        compile_program: as in `audit`.
        traced: False accepts arrays that the program spells out and this device's compiler removes. Another device's
            compiler may keep them.

    Returns:
        None.

    Raises:
        AssertionError: with shape, dtype, bytes, primitive and source line of each array, and what to do.
        ValueError: as in `audit`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> hidden, lm_head = jnp.ones((32, 16)), jnp.ones((16, 512))
        >>> assert_logitless(lambda h, w: (h @ w[:, :64]).sum(), hidden, lm_head, vocab_size=512, num_tokens=32)

    Reference: none.
    """
    report = audit(
        fn,
        *args,
        vocab_size=vocab_size,
        num_tokens=num_tokens,
        differentiate=differentiate,
        allow_outputs=allow_outputs,
        compile_program=compile_program,
    )
    if not report.materialised and not (traced and report.traced):
        return
    advice = [
        "Compute per-token values with logitless.linear_logprobs(hidden, lm_head, targets), which holds one block of "
        "the vocabulary at a time, or find the line above that builds the array (a one-hot, a softmax kept for the "
        "backward pass, a padded copy).",
    ]
    if not report.materialised and report.compiled:
        advice.append("This compiler fused all of them away; traced=False accepts that, for this device only.")
    if not allow_outputs:
        advice.append("If fn takes the logits and returns their gradient, allow_outputs=True allows that one array.")
    raise AssertionError("\n".join(["assert_logitless: the program holds logits", str(report), *advice]))


def _is_array(leaf: object) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_float(leaf: Any) -> bool:
    return bool(_is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating))


def _positions(args: Sequence[Any], differentiate: int | Sequence[int] | None) -> set[int]:
    if differentiate is None:
        return set(range(len(args)))
    positions = (differentiate,) if isinstance(differentiate, int) else tuple(differentiate)
    wrong = [p for p in positions if not -len(args) <= p < len(args)]
    if wrong:
        given = {"differentiate": positions, "number of arguments": len(args)}
        raise shape_error("audit", given, f"there is no argument at position {wrong[0]}; name one that exists")
    return {p % len(args) for p in positions}


def _programs(
    fn: Callable[..., Any], args: tuple[Any, ...], differentiate: int | Sequence[int] | None
) -> Iterable[_Program]:
    """The function of its array leaves, and its gradient if it has one."""
    wanted = _positions(args, differentiate)
    flat, treedef = jax.tree.flatten(args)
    owner = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    slots = [i for i, leaf in enumerate(flat) if _is_array(leaf)]
    leaves = [flat[i] for i in slots]
    chosen = [k for k, i in enumerate(slots) if owner[i] in wanted and _is_float(flat[i])]

    def forward(*arrays: Any) -> Any:
        filled = list(flat)
        for slot, array in zip(slots, arrays, strict=True):
            filled[slot] = array
        return fn(*jax.tree.unflatten(treedef, filled))

    yield _Program("forward", forward, leaves)
    result = jax.eval_shape(forward, *leaves)
    outputs = jax.tree.leaves(result)
    first: Any = result[0] if isinstance(result, tuple) and result else result
    scalar = _is_float(first) and not first.shape
    live = [0] if scalar else [j for j, leaf in enumerate(outputs) if _is_float(leaf)]
    if not chosen or not live:
        return
    cotangents = [] if scalar else [jax.ShapeDtypeStruct(outputs[j].shape, outputs[j].dtype) for j in live]

    def gradient(*arrays: Any) -> Any:
        inputs, given = list(arrays[: len(leaves)]), list(arrays[len(leaves) :])

        def primal(*diff: Any) -> tuple[list[Any], list[Any]]:
            for k, array in zip(chosen, diff, strict=True):
                inputs[k] = array
            values = jax.tree.leaves(forward(*inputs))
            return [values[j] for j in live], [v for j, v in enumerate(values) if j not in live]

        try:
            values, pullback, aux = jax.vjp(primal, *[inputs[k] for k in chosen], has_aux=True)
        except NotImplementedError as error:
            error.add_note("audit: if fn takes gradients itself (a training step), pass differentiate=()")
            raise
        return values, list(pullback(given or [jnp.ones_like(v) for v in values])), aux

    ties = [(j, len(leaves) + j) for j in range(len(cotangents))]
    ties += [(len(live) + j, k) for j, k in enumerate(chosen)]
    yield _Program("gradient", gradient, [*leaves, *cotangents], len(cotangents), ties)


def _trace(program: _Program, vocab_size: int, num_tokens: int, allow_outputs: bool) -> _Judge:
    closed = jax.make_jaxpr(program.fn)(*program.leaves)
    jaxpr, _ = open_jaxpr(closed)
    sizes = Sizes(vocab_size, num_tokens)
    walk = Walk(sizes, vocab_size * num_tokens)
    arguments = [walk.root(var.aval) for var in jaxpr.invars]
    constants = [walk.root(var.aval) for var in jaxpr.constvars]
    _require_sizes(walk.roots, sizes)
    live = eliminate_dead_code(jaxpr)
    own = program.leaves[: len(program.leaves) - program.num_cotangents]
    given = {(tuple(leaf.shape), leaf.dtype) for leaf in own}
    allowed = [allow_outputs and (var.aval.shape, var.aval.dtype) in given for var in live.outvars]
    outputs = walk.open_jaxpr(live, arguments, constants, "unknown", allowed)
    for output, argument in program.output_ties:
        tie_values(walk.axes, outputs[output], arguments[argument])
    walk.settle_opaque()
    return _Judge(program.where, walk.made, Kinds(walk.axes, walk.roots, sizes), walk.roots, sizes)


def _require_sizes(roots: Sequence[Root], sizes: Sizes) -> None:
    """Sizes that no argument has would find nothing in any program: an audit that always passes."""
    shapes = [root.shape for root in roots]
    if not any(_holds_vocab(shape, sizes) for shape in shapes):
        given = {"vocab_size": sizes.vocab_size, "arguments of shapes": shapes}
        raise shape_error(
            "audit", given, "no argument or closed-over array has a vocabulary axis; pass the LM head and its own V"
        )
    if not any(sizes.is_token(math.prod(span)) for shape in shapes for span in _spans(shape)):
        given = {"num_tokens": sizes.num_tokens, "arguments of shapes": shapes}
        raise shape_error("audit", given, "no argument has that many tokens; pass N = B * T of these very arguments")


def _holds_vocab(shape: tuple[int, ...], sizes: Sizes) -> bool:
    """One axis of V, padded or a shard of it; or neighbouring axes of a tiled head, which has another axis too."""
    for span in _spans(shape):
        size = math.prod(span)
        if len(span) == 1 and sizes.is_vocab(size):
            return True
        if 1 < len(span) < len(shape) and any(1 <= size / -(-sizes.vocab_size // n) <= 1.1 for n in sizes.shards):
            return True
    return False


def _spans(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every run of neighbouring axes."""
    return [shape[i:j] for i in range(len(shape)) for j in range(i + 1, len(shape) + 1)]


def _dims(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size > 1))


def _shard_of(local: tuple[int, ...], whole: tuple[int, ...], devices: int) -> bool:
    """Whether an array of these dimensions, spread over the devices, leaves each with `local`."""
    if len(local) != len(whole) or any(b % a for a, b in zip(local, whole, strict=True)):
        return False
    return devices % (math.prod(whole) // math.prod(local)) == 0


@dataclass
class _Judge:
    """The verdicts over one program: by provenance in the trace, by match to the trace and by sizes in the HLO."""

    where: Where
    made: list[Made]
    kinds: Kinds
    roots: list[Root]
    sizes: Sizes

    def _is_leak(self, array: Made) -> bool:
        whole = self.sizes.num_tokens * self.sizes.vocab_size
        elements = self.kinds.logits_elements(array.shape, array.axes)
        return not array.is_output and 2 * elements >= array.fair_share(self.kinds, whole)

    def traced_leaks(self) -> list[Leak]:
        return [
            Leak(a.shape, str(a.dtype), _bytes(a), a.primitive, self.where, a.source)
            for a in self.made
            if self._is_leak(a)
        ]

    def materialised_leaks(self, text: str) -> list[Leak]:
        devices = hlo.num_partitions(text)
        self.sizes.shards |= {d for d in range(1, devices + 1) if devices % d == 0}
        floor = self.sizes.num_tokens * self.sizes.vocab_size / (2 * devices)
        verdicts = [(a, _dims(a.shape), self._is_leak(a)) for a in self.made]
        return [
            Leak(b.shape, b.dtype, b.bytes, b.opcode, self.where, b.source)
            for b in hlo.buffers(text, floor)
            if self._buffer_leaks(b, verdicts, devices)
        ]

    def _buffer_leaks(
        self, buffer: hlo.Buffer, verdicts: list[tuple[Made, tuple[int, ...], bool]], devices: int
    ) -> bool:
        """The verdict on the traced arrays of these dimensions; the most closely matching ones that agree decide."""
        dims = _dims(buffer.shape)
        same = [(made, leak) for made, shape, leak in verdicts if shape == dims]
        same = same or [(made, leak) for made, shape, leak in verdicts if _shard_of(dims, shape, devices)]
        operation = buffer.operation.rsplit("/", 1)[-1]
        near = [leak for made, leak in same if made.source == buffer.source]
        nearest = [leak for made, leak in same if made.source == buffer.source and made.primitive == operation]
        for found in (nearest, near, [leak for _, leak in same]):
            if len(set(found)) == 1:
                return found[0]
        if same:
            return True
        copied = [r for r in self.roots if _shard_of(dims, _dims(r.shape), devices)]
        if copied and not any(self.kinds.logits_elements(r.shape, r.axes) for r in copied):
            return False
        return self._sizes_leak(dims)

    def _sizes_leak(self, dims: tuple[int, ...]) -> bool:
        """Some of the dimensions make up a vocabulary, and the others no feature axis of an argument."""
        features = {size for size in self.kinds.feature_sizes() if size > 1}
        whole = self.sizes.num_tokens * self.sizes.vocab_size
        if len(dims) == 1:
            return any(whole // s <= dims[0] <= 1.1 * whole / s for s in self.sizes.shards)
        for count in range(1, len(dims)):
            for picked in itertools.combinations(range(len(dims)), count):
                vocab = math.prod(dims[i] for i in picked)
                rest = math.prod(dims) // vocab
                if self.sizes.is_vocab(vocab) and (self.sizes.is_token(rest) or all(rest % f for f in features)):
                    return True
        return False


def _bytes(array: Made) -> int:
    itemsize = np.dtype(str(array.dtype)).itemsize if array.dtype is not None else 0
    return math.prod(array.shape) * itemsize
