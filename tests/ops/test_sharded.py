"""Tokens and head over a mesh of eight virtual devices against one: values and all gradients in their budget."""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from logitless import HeadSharding, head_strategy
from logitless._arrays import tracing_for
from logitless.ops import sharded_device
from logitless.ops.api import linear_token_loss, linear_token_stats, token_stats
from logitless.ops.choice import INTERPRETED
from logitless.ops.types import OUTPUT_NAMES
from problems import HERE, LOGITS_HERE, Problem, assert_in_budget, in_layout, peaked, sizes_for

slow = pytest.mark.slow
NAMES = (*OUTPUT_NAMES, "d_hidden", "d_lm_head", "d_bias")
SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tokens over all": {"tokens": P("data", ("fsdp", "tensor")), "vocab": ()},
    "whole tokens": {"tokens": (), "vocab": ("tensor",)},
    "sequence x tensor": {"tokens": P(None, "data"), "vocab": "tensor"},
    "data x two of vocabulary": {"tokens": "data", "vocab": ("tensor", "fsdp")},
    "gather_head": {"tokens": P("data", "fsdp"), "vocab": ("tensor", "fsdp"), "head": "gather_head"},
    "gather_tokens": {"tokens": P("data", "fsdp"), "vocab": ("tensor", "fsdp"), "head": "gather_tokens"},
    "gather_head over all": {
        "tokens": P("data", ("fsdp", "tensor")),
        "vocab": ("tensor", "data", "fsdp"),
        "head": "gather_head",
    },
    "gather_tokens over all": {
        "tokens": P("data", ("fsdp", "tensor")),
        "vocab": ("tensor", "data", "fsdp"),
        "head": "gather_tokens",
    },
}
DISJOINT = [name for name in LAYOUTS if "gather" not in name]


@functools.cache
def mesh(kind: str = "Auto") -> Mesh:
    return jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(getattr(AxisType, kind),) * len(SIZES))


def sharding_of(layout: str, vocab_size: int | None = None, kind: str = "Auto") -> HeadSharding:
    return HeadSharding(mesh(kind), vocab_size=vocab_size, **LAYOUTS[layout])


class Case(NamedTuple):
    """Of one program: B and T, D, V of the head, its true V, and the options."""

    shape: tuple[int, int] = (2, 20)
    width: int = 24
    columns: int = 512
    vocab_size: int | None = None
    dtype: str = "float32"
    head: Any = "VD"
    options: tuple[tuple[str, Any], ...] = ()
    impossible: bool = False

    @property
    def vocab(self) -> int:
        return self.vocab_size or self.columns


CASES = {
    "all divides": Case(),
    "a head that no axis divides": Case(columns=701, head="DV"),
    # Of eight parts of 132 columns the last ones hold nothing but padding.
    "parts of padding only": Case(columns=1056, vocab_size=701, options=(("softcap", 20.0), ("temperature", 0.7))),
    "columns taken out": Case(columns=512, vocab_size=509, impossible=True, head="DV"),
    "16 bits": Case(dtype="bfloat16", columns=704, vocab_size=701, options=(("logit_scale", 1.3),)),
}


@functools.cache
def given(case: Case) -> tuple[Problem, jax.Array]:
    """A peaked problem over the true vocabulary, and cotangents; some columns cannot be, where the case says so."""
    b, t = case.shape
    p = peaked(b * t, case.width, case.vocab, case.dtype)
    bias = np.array(p.bias, np.float32)
    if case.impossible:
        bias[np.setdiff1d(np.arange(3, case.vocab, 7), np.asarray(p.targets))] = -np.inf
    p = p._replace(
        hidden=p.hidden.reshape(b, t, -1),
        targets=p.targets.reshape(b, t),
        mask=p.mask.reshape(b, t),
        bias=jnp.asarray(bias, case.dtype),
    )
    cotangents = np.random.default_rng(1).normal(size=(4, b, t))
    if case.impossible:
        # A mean of -inf has no slope.
        cotangents[OUTPUT_NAMES.index("mean_logits")] = 0.0
    return p, jnp.asarray(cotangents, jnp.float32)


def padded(x: jax.Array, case: Case, axis: int) -> jax.Array:
    """With columns of rubbish behind the true vocabulary."""
    more = [(0, case.columns - case.vocab if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, more, constant_values=jnp.asarray(jnp.nan, x.dtype))


# Most of a test's time is the compiler's.
FAST = {"xla_backend_optimization_level": 1}


@functools.partial(jax.jit, static_argnames=("case", "implementation", "sharding"), compiler_options=FAST)
def outcome(problem: Problem, cotangents: jax.Array, case: Case, implementation: str, sharding: HeadSharding | None):
    """All statistics and gradients; those of padding are cut off once they are known to be 0."""

    def stats(hidden, lm_head, bias):
        return linear_token_stats(
            hidden,
            lm_head,
            problem.targets,
            outputs=OUTPUT_NAMES,
            layout=case.head,
            bias=bias,
            mask=problem.mask,
            implementation=implementation,
            sharding=sharding,
            block_sizes=sizes_for(implementation, None),
            **dict(case.options),
        )

    lm_head, bias = in_layout(problem.lm_head, case.head), problem.bias
    if sharding is not None:
        lm_head, bias = padded(lm_head, case, case.head.index("V")), padded(bias, case, 0)
    out, pull = jax.vjp(stats, problem.hidden, lm_head, bias)
    return *out, *pull(type(out)(*cotangents))


@functools.cache
def expected(case: Case) -> tuple[Any, Any]:
    """By plain jnp on one device, in the case's dtype and in float64."""
    problem, cotangents = given(case)
    plain = outcome(problem, cotangents, case._replace(columns=case.vocab), "reference", None)
    with jax.enable_x64(True):
        wide = Problem(*(x.astype(jnp.float64) if x.dtype.kind in "fV" else x for x in problem))
        oracle = outcome(wide, cotangents.astype(jnp.float64), case._replace(columns=case.vocab), "reference", None)
        return jax.tree.map(np.asarray, plain), jax.tree.map(np.asarray, oracle)


def assert_within_budget(case: Case, found: Any, ulps: float = 8.0) -> None:
    plain, oracle = expected(case)
    for name, ours, *others in zip(NAMES, found, plain, oracle, strict=True):
        ours = np.asarray(jax.device_get(ours))
        axis = {"d_lm_head": case.head.index("V"), "d_bias": 0}.get(name)
        if axis is not None and case.columns > case.vocab:
            ours, padding = np.split(ours, [case.vocab], axis)
            assert not padding.astype(np.float32).any(), f"{name}: a gradient of padding"
        assert ours.dtype == others[0].dtype
        assert_in_budget(name, jnp.asarray(ours), *others, ulps=ulps)


@pytest.fixture
def several_pieces(monkeypatch):
    """So few bytes at one time that head and tokens come in several pieces, the last of which meets another."""
    monkeypatch.setattr(sharded_device, "GATHERED_BYTES", 4096)
    monkeypatch.setattr(sharded_device, "SUMMED_BYTES", 4096)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *((layout, name) for layout in ("gather_head", "gather_tokens over all") for name in CASES),
        *((layout, "16 bits") for layout in LAYOUTS if layout not in ("gather_head", "gather_tokens over all")),
    ],
)
def test_every_layout_in_several_pieces(layout, name, several_pieces):
    case = CASES[name]
    problem, cotangents = given(case)
    assert_within_budget(case, outcome(problem, cotangents, case, "chunked", sharding_of(layout, case.vocab_size)))


@pytest.mark.parametrize("implementation", HERE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_implementation(layout, implementation):
    case = CASES["columns taken out"]
    problem, cotangents = given(case)
    assert_within_budget(case, outcome(problem, cotangents, case, implementation, sharding_of(layout, case.vocab_size)))


@pytest.mark.parametrize("layout", ["gather_tokens", pytest.param("gather_head", marks=slow)])
@pytest.mark.parametrize("case", [CASES["columns taken out"]._replace(columns=1024, vocab_size=1001, shape=(2, 8))])
def test_the_kernels_of_a_tpu(layout, case, monkeypatch):
    # Two blocks of the head, or two chunks of the tokens.
    monkeypatch.setattr(
        sharded_device, "GATHERED_BYTES", 2 * 128 * 24 * 4 if layout == "gather_head" else 2 * 2 * 24 * 4
    )
    problem, cotangents = given(case)
    assert_within_budget(case, outcome(problem, cotangents, case, INTERPRETED, sharding_of(layout, case.vocab_size)))


@slow
@pytest.mark.parametrize("layout", ["tokens over all", "data x two of vocabulary"])
@pytest.mark.parametrize("name", ["parts of padding only", "16 bits"])
def test_the_kernels_of_a_tpu_without_a_gather(layout, name):
    case = CASES[name]._replace(shape=(2, 8))
    problem, cotangents = given(case)
    assert_within_budget(case, outcome(problem, cotangents, case, INTERPRETED, sharding_of(layout, case.vocab_size)))


def test_a_ragged_head_on_a_tpu_is_read_as_it_lies(monkeypatch):
    """`[D, V]` with D inside: it is turned where a TPU has it so, and its gradient back."""
    monkeypatch.setattr(sharded_device, "GATHERED_BYTES", 2**16)
    case = CASES["a head that no axis divides"]._replace(width=128, columns=704, vocab_size=701)
    problem, cotangents = given(case)
    for layout in ("gather_head", "gather_tokens", "data x two of vocabulary"):
        with tracing_for("tpu", "TPU v6 lite"):
            found = outcome(problem, cotangents, case, "chunked", sharding_of(layout, case.vocab_size))
        assert_within_budget(case, found)
        jax.clear_caches()


def test_every_gradient_comes_back_as_its_array_lies():
    case = CASES["all divides"]
    problem, cotangents = given(case)
    for layout in ("sequence x tensor", "gather_head over all", "gather_tokens"):
        sharding = sharding_of(layout)
        *stats, d_hidden, d_lm_head, d_bias = outcome(problem, cotangents, case, "chunked", sharding)

        def lies(x, spec):
            return x.sharding.is_equivalent_to(NamedSharding(mesh(), spec), x.ndim)

        assert all(lies(x, sharding.token_spec) for x in stats)
        assert lies(d_hidden, sharding.of_rows(ndim=2))
        assert lies(d_lm_head, sharding.head_spec(case.head)) and lies(d_bias, sharding.bias_spec)


def nll(logprob, weight):
    return -weight * logprob


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_of_all_tokens(layout):
    """`one_pass` where every device has all columns; else `auto` takes one that can."""
    case = Case(columns=704, vocab_size=None if layout == "tokens over all" else 701)
    problem, cotangents = given(case)
    sharding = sharding_of(layout, case.vocab_size)

    def loss(hidden, lm_head, implementation, sharding):
        weights = cotangents[0].astype(jnp.result_type(hidden))
        options: Any = {"layout": "VD", "mask": problem.mask, "implementation": implementation, "sharding": sharding}
        return linear_token_loss(hidden, lm_head, problem.targets, nll, (weights,), **options)

    grad = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=(2, 3))
    plain = grad(problem.hidden, problem.lm_head, "reference", None)
    with jax.enable_x64(True):
        oracle = grad(problem.hidden.astype(jnp.float64), problem.lm_head.astype(jnp.float64), "reference", None)
    lm_head = jnp.pad(problem.lm_head, [(0, case.columns - case.vocab), (0, 0)])
    for implementation in ("auto", "chunked", *(["one_pass"] if layout == "tokens over all" else [])):
        (value, logprobs), (d_hidden, d_lm_head) = grad(problem.hidden, lm_head, implementation, sharding)
        found = (value, logprobs), (d_hidden, d_lm_head[: case.vocab])
        for name, *values in zip(
            ("loss", "logprobs", "d_hidden", "d_lm_head"), *map(jax.tree.leaves, (found, plain, oracle)), strict=True
        ):
            assert_in_budget(name, *values, ulps=16 if name == "loss" else 8)


def test_one_pass_needs_all_columns_on_a_device():
    problem, _ = given(CASES["all divides"])
    for sharding, why in [
        (sharding_of("gather_tokens"), "the vocabulary is split over tensor, fsdp"),
        (sharding_of("tokens over all", 500), "HeadSharding gives a vocab_size"),
    ]:
        with pytest.raises(NotImplementedError, match=f"'one_pass' cannot run: {why}; use implementation='chunked'"):
            linear_token_loss(
                problem.hidden,
                problem.lm_head,
                problem.targets % 500,
                nll,
                (1.0,),
                layout="VD",
                implementation="one_pass",
                sharding=sharding,
            )


@pytest.mark.parametrize("implementation", LOGITS_HERE)
@pytest.mark.parametrize("layout", DISJOINT)
@pytest.mark.parametrize("vocab", [512, 509])
def test_logits_whose_vocabulary_is_split(layout, implementation, vocab):
    check_logits(layout, implementation, vocab, (2, 20))


@slow
@pytest.mark.parametrize("layout", ["sequence x tensor", "data x two of vocabulary"])
def test_the_logits_kernels_of_a_tpu(layout):
    check_logits(layout, INTERPRETED, 509, (2, 8))


def check_logits(layout: str, implementation: str, vocab: int, shape: tuple[int, int]) -> None:
    p = peaked(shape[0] * shape[1], 24, vocab, "float32")
    logits = (p.hidden @ p.lm_head.T).at[:, 5].set(-jnp.inf).reshape(*shape, -1)
    targets, mask = jnp.where(p.targets == 5, 6, p.targets).reshape(shape), p.mask.reshape(shape)
    cotangents = np.random.default_rng(1).normal(size=(4, *shape))
    sharding = sharding_of(layout, vocab)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def both(logits, implementation, sharding):
        options: Any = {"implementation": implementation, "sharding": sharding, "softcap": 30.0}
        out, pull = jax.vjp(lambda x: token_stats(x, targets, mask=mask, outputs=OUTPUT_NAMES, **options), logits)
        return *out, *pull(type(out)(*(jnp.asarray(c, out.lse.dtype) for c in cotangents)))

    plain = both(logits, "reference", None)
    with jax.enable_x64(True):
        oracle = both(logits.astype(jnp.float64), "reference", None)
    found = both(jnp.pad(logits, [(0, 0), (0, 0), (0, 512 - vocab)], constant_values=jnp.nan), implementation, sharding)
    for name, ours, *others in zip((*OUTPUT_NAMES, "d_logits"), found, plain, oracle, strict=True):
        if name == "d_logits":
            assert not np.asarray(ours[..., vocab:]).any()
            ours = ours[..., :vocab]
        assert_in_budget(name, ours, *others, ulps=8)


def test_a_target_of_another_part_is_no_column_of_padding():
    """apple/ml-cross-entropy#59: V = 10 over two parts, a block of 8: the sentinel was the index of a padded column."""
    line = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    p = peaked(10, 6, 10, "float32")
    targets = jnp.arange(10)
    want = linear_token_stats(p.hidden, p.lm_head, targets, layout="VD", implementation="reference")
    for head, vocab_size in [(p.lm_head, None), (jnp.pad(p.lm_head, [(0, 6), (0, 0)]), 10)]:
        sharding = HeadSharding(line, tokens=(), vocab="tensor", vocab_size=vocab_size)
        for blocks in (None, {"block_v": 8}):
            found = linear_token_stats(
                p.hidden, head, targets, layout="VD", implementation="chunked", sharding=sharding, block_sizes=blocks
            )
            assert np.isfinite(found.logprobs).all()
            np.testing.assert_allclose(found.logprobs, want.logprobs, rtol=1e-5, atol=1e-6)


def program_text(layout: str, columns: int = 8192) -> tuple[Any, str]:
    """The compiled program of a step at sizes that show what is whole in it: D = 64, 1024 tokens a device."""
    sharding = sharding_of(layout)

    def shape(dims, dtype, spec):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh(), spec))

    args = (
        shape((8, 512, 64), jnp.float32, sharding.of_rows(ndim=2)),
        shape((columns, 64), jnp.float32, sharding.head_spec("VD")),
        shape((8, 512), jnp.int32, sharding.token_spec),
    )

    def loss(hidden, lm_head, targets):
        stats = linear_token_stats(
            hidden, lm_head, targets, outputs=("logprobs",), layout="VD", implementation="chunked", sharding=sharding
        )
        return stats.logprobs.sum()

    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*args).compile()
    return compiled, compiled.as_text() or ""


@pytest.mark.parametrize("layout", ["gather_tokens", "gather_head"])
def test_nothing_is_whole_on_a_device(layout, monkeypatch):
    """No array of all columns, none of all tokens; where the tokens travel, no column of the head does."""
    monkeypatch.setattr(sharded_device, "GATHERED_BYTES", 2**15)
    compiled, text = program_text(layout)
    own_columns, own_tokens = 8192 // 4, 8 * 512 // 4
    gathered = [line for line in text.splitlines() if " all-gather(" in line or " all-gather-start(" in line]
    assert gathered
    shapes = [
        tuple(map(int, dims.split(",")))
        for line in gathered
        for dims in re.findall(r"f32\[([\d,]+)\]", line.split("all-gather")[0])
    ]
    rows = [dims[-2] for dims in shapes if dims[-1] == 64 and len(dims) > 1]
    # The pieces of 2^15 bytes of float32 at D = 64 have 128 rows.
    assert rows and max(rows) <= 128
    for whole in ("f32[8192,64]", "f32[64,8192]", "f32[4096,64]", "f32[8,512,64]"):
        assert whole not in text, f"{whole} is whole on a device"
    # Of each device: gradients of its own tokens and columns in float32, the column sums, and small pieces.
    own = 4 * 64 * (2 * own_columns + 2 * own_tokens)
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * own
    head_pieces = [line for line in gathered if "gather_head" in line]
    assert bool(head_pieces) == (layout == "gather_head")


def test_auto_takes_what_moves_fewer_bytes():
    for tokens, vocab, other in [(8, 100_000, "gather_tokens"), (100_000, 80, "gather_head")]:
        found = head_strategy(sharding_of("gather_head over all"), tokens * 8, 64, vocab)
        assert found.name == "gather_head" and min(found.bytes, key=found.bytes.__getitem__) == other
        auto = HeadSharding(mesh(), tokens=P("data", ("fsdp", "tensor")), vocab=("tensor", "data", "fsdp"))
        assert head_strategy(auto, tokens * 8, 64, vocab).name == other
    disjoint = head_strategy(sharding_of("sequence x tensor"), 100, 64, 1000)
    assert disjoint.name == "" and set(disjoint.bytes.values()) == {0}


def test_the_bytes_of_a_strategy_are_what_its_pieces_weigh():
    """Seven of eight parts come in twice, in 16 bits, and their gradients go out once, in float32."""
    over = HeadSharding(jax.sharding.AbstractMesh((8,), ("fsdp",)), tokens=("fsdp",), vocab=("fsdp",))
    assert head_strategy(over, 8 * 100, 64, 8 * 50).bytes == {
        "gather_head": 7 * 50 * 64 * 8,
        "gather_tokens": 7 * 100 * 64 * 8,
    }
    frozen = head_strategy(over, 8 * 100, 64, 8 * 50, trained=(True, False)).bytes
    assert frozen == {"gather_head": 7 * 50 * 64 * 4, "gather_tokens": 7 * 100 * 64 * 8}
    forward = head_strategy(over, 8 * 100, 64, 8 * 50, trained=None).bytes
    assert forward == {"gather_head": 7 * 50 * 64 * 2, "gather_tokens": 7 * 100 * 64 * 2}
