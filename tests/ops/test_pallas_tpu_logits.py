"""The TPU kernels for logits: in the interpreter, which simulates memory and copies, and lowered for a TPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from logitless.ops.chunked_logits import token_stats_chunked
from logitless.ops.pallas_tpu_logits import token_stats_pallas_tpu
from logitless.ops.reference import token_stats_reference
from logitless.ops.types import OUTPUT_NAMES, HeadOptions, LogitScalars
from problems import assert_in_budget, equations, peaked

SCALARS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 20.0},
    "logit_scale": {"logit_scale": 0.3},
    "mask": {},
    "all": {"temperature": 0.7, "softcap": 20.0, "logit_scale": 1.3},
}
MODES = ("eager", "on_wait")
# Compiling takes longer than running.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def options(mode: Any = "on_wait", *, outputs=OUTPUT_NAMES, block_n=16, block_v=128) -> HeadOptions:
    """Small blocks; the interpreter with races watched and memory full of NaN, or none to compile."""
    interpret = mode and pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", dma_execution_mode=mode)
    return HeadOptions(outputs=outputs, block_n=block_n, block_v=block_v, platform="tpu", interpret=interpret)


@functools.cache
def program(implementation, how: HeadOptions, scalars: tuple[tuple[str, float], ...] = (), takes_mask: bool = False):
    """All outputs asked for, and the gradient of the logits for one cotangent of each; compiled once."""

    @compiled
    def both(logits, targets, mask, cotangents):
        numbers = LogitScalars(**{name: jnp.asarray(x, jnp.result_type(float)) for name, x in scalars})

        def stats(logits):
            return implementation(logits, targets, mask if takes_mask else None, numbers, how)

        out, pull = jax.vjp(stats, logits)
        return out, pull(type(out)(**dict(zip(how.outputs, cotangents, strict=True))))[0]

    return both


def run(logits, targets, cotangents, how: HeadOptions, mask=None, scalars=(), implementation=token_stats_pallas_tpu):
    """Statistics and gradient of the logits; without a race."""
    out, d_logits = program(implementation, how, tuple(scalars), mask is not None)(logits, targets, mask, cotangents)
    jax.block_until_ready(d_logits)
    if implementation is token_stats_pallas_tpu:
        assert interpret_pallas_call.races is not None and not interpret_pallas_call.races.races_found
    return out, d_logits


def assert_within_budget(logits, targets, how: HeadOptions, mask=None, scalars=(), seed: int = 0):
    """Statistics and gradient within the error budget; returns ours."""
    cotangents = np.random.default_rng(seed).normal(size=(len(how.outputs), targets.size)).astype(np.float32)
    # One token that only the mean logit flows to, and one that nothing does.
    cotangents[:-1, 1:3] = 0.0
    cotangents[-1, 2:3] = 0.0
    cotangents = jnp.asarray(cotangents)
    plain = functools.partial(run, how=options(None, outputs=how.outputs), implementation=token_stats_reference)
    ours = run(logits, targets, cotangents, how, mask, scalars)
    in_32 = plain(logits, targets, cotangents, mask=mask, scalars=scalars)
    with jax.enable_x64(True):
        wide = logits.astype(jnp.float64), targets, cotangents.astype(jnp.float64)
        oracle = plain(*wide, mask=mask, scalars=scalars)
    for name in how.outputs:
        assert getattr(ours[0], name).dtype == jnp.float32
        assert_in_budget(name, *(getattr(result[0], name) for result in (ours, in_32, oracle)))
    assert ours[1].dtype == logits.dtype
    assert_in_budget("d_logits", ours[1], in_32[1], oracle[1])
    return ours


def logits_of(n: int, v: int, dtype: str, seed: int = 0):
    problem = peaked(n, 24, v, "float32", seed)
    return (problem.hidden @ problem.lm_head.T).astype(dtype), problem.targets, problem.mask


@pytest.mark.parametrize(
    ("option", "dtype"),
    [
        ("plain", "float32"),
        ("plain", "bfloat16"),
        ("temperature", "float32"),
        ("softcap", "bfloat16"),
        ("logit_scale", "bfloat16"),
        ("mask", "float32"),
        ("all", "bfloat16"),
    ],
)
def test_options_stay_in_budget_on_ragged_sizes(option, dtype):
    logits, targets, mask = logits_of(37, 301, dtype)
    mode = MODES[dtype == "bfloat16"]
    assert_within_budget(
        logits,
        targets,
        options(mode, block_v=256),
        mask if option in ("mask", "all") else None,
        SCALARS[option].items(),
    )


@pytest.mark.parametrize(
    ("size", "blocks", "mode"),
    [
        # Everything divides: the gradient takes the logits' place.
        ((32, 384), (16, 128), "eager"),
        ((32, 384), (16, 128), "on_wait"),
        # Chunks of 8 rows; one block of the vocabulary, ragged.
        ((40, 250), (24, 256), "eager"),
        # One token, one column, by the kernels' own rule.
        ((1, 1), (None, None), "on_wait"),
        # A last block of one column.
        ((17, 129), (24, 128), "on_wait"),
    ],
)
def test_sizes_and_blocks_stay_in_budget(size, blocks, mode):
    logits, targets, mask = logits_of(size[0], size[1], "float32")
    assert_within_budget(logits, targets, options(mode, block_n=blocks[0], block_v=blocks[1]), mask)


@pytest.mark.parametrize("outputs", [("lse",), ("entropy",), ("mean_logits",)])
def test_each_output_alone(outputs):
    logits, targets, _ = logits_of(16, 256, "float32")
    assert_within_budget(logits, targets, options(outputs=outputs))


@pytest.fixture
def x64_everywhere():
    """64 bits in all threads: the interpreter's callbacks run in others than the test."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def test_float64_in_the_interpreter_has_all_its_digits(x64_everywhere):
    logits, targets, mask = logits_of(20, 200, "float64")
    cotangents = jnp.asarray(np.random.default_rng(0).normal(size=(4, 20)))
    numbers = SCALARS["all"].items()
    ours = run(logits, targets, cotangents, options(), mask, numbers)
    oracle = run(logits, targets, cotangents, options(None), mask, numbers, token_stats_reference)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13), ours, oracle)


@pytest.mark.parametrize("scalars", [(), (("softcap", 20.0),)])
def test_columns_that_are_impossible(scalars):
    logits, targets, _ = logits_of(16, 300, "float32")
    logits = logits.at[0:4, 128:256].set(-jnp.inf)  # a whole block
    logits = logits.at[4, :].set(-jnp.inf)  # a whole row
    logits = logits.at[5, targets[5]].set(-jnp.inf)
    logits = logits.at[6, :].set(-jnp.inf).at[6, targets[6]].set(3.0)  # none but the target
    logits = logits.at[7:9, ::2].set(-jnp.inf)
    # Not of the mean logit: such a column has no gradient, where -inf would have one.
    ours, d_logits = assert_within_budget(
        logits, targets, options(outputs=("logprobs", "lse", "entropy")), scalars=scalars
    )
    assert np.isnan(ours.lse[4]) and ours.logprobs[5] == -jnp.inf and ours.logprobs[6] == 0.0
    assert not np.asarray(d_logits)[np.isinf(logits)].any()


@pytest.mark.parametrize("implementation", [token_stats_pallas_tpu, token_stats_chunked])
def test_columns_at_the_lowest_finite_logit(implementation):
    # So do decoders write "not allowed"; 1000 of them times the difference to the others are beyond float32.
    lowest = float(jnp.finfo(jnp.float32).min)
    logits = jnp.full((16, 1000), lowest).at[0, 300].set(1.0).at[1, jnp.arange(900, 904)].set(1.0)
    targets = jnp.full(16, 300, jnp.int32)
    outputs = ("logprobs", "lse", "entropy")
    out, d_logits = run(
        logits, targets, jnp.full((3, 16), 2.0), options(outputs=outputs), implementation=implementation
    )
    np.testing.assert_allclose(out.entropy, [0.0, np.log(4), *[np.log(1000)] * 14], rtol=1e-6)
    np.testing.assert_allclose(out.logprobs[:2], [0.0, lowest], rtol=1e-6)
    # lse and logprobs cancel in the first row but for the target; the entropy of a uniform row has no slope.
    expected = np.zeros((2, 1000))
    expected[0, 300] = expected[1, 300] = 2.0
    np.testing.assert_allclose(d_logits[:2], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("mode", "size"), [("eager", (48, 256)), ("on_wait", (45, 201))], ids=["everything divides", "nothing divides"]
)
def test_tokens_without_a_gradient_have_none_whatever_their_logits(mode, size):
    logits, targets, _ = logits_of(size[0], size[1], "float32")
    count = size[0]
    mask = jnp.ones(count, bool).at[16:32].set(False).at[40].set(False)
    # Masked: a whole block, and a token of another. Not masked, but without a cotangent: token 3.
    logits = logits.at[20, 5].set(jnp.nan).at[21].set(jnp.inf).at[40].set(jnp.nan).at[3, 1].set(jnp.nan)
    cotangents = jnp.ones((4, count)).at[:, 3].set(0.0)
    out, d_logits = run(logits, targets, cotangents, options(mode), mask)
    d_logits = np.asarray(d_logits)
    for name, x in out._asdict().items():
        assert not np.asarray(x)[~np.asarray(mask)].any(), name
        assert np.isfinite(np.delete(np.asarray(x), 3)).all(), name
    assert np.isnan(out.lse[3])
    flows = np.asarray(mask) & (np.arange(count) != 3)
    assert not d_logits[~flows].any()
    assert np.isfinite(d_logits).all() and (np.abs(d_logits[flows]).sum(axis=1) > 0).all()


def test_a_nan_logit_spoils_its_row():
    logits, targets, _ = logits_of(16, 200, "float32")
    out, d_logits = run(logits.at[2, 150].set(jnp.nan), targets, jnp.ones((4, 16)), options())
    for name, x in out._asdict().items():
        assert list(np.flatnonzero(np.isnan(x))) == [2], name
    assert list(np.flatnonzero(np.isnan(d_logits).any(axis=1))) == [2]


@pytest.mark.parametrize("vocab", [256, 200], ids=["at a block's end", "inside a block"])
def test_a_target_outside_the_vocabulary(vocab):
    logits, targets, _ = logits_of(16, vocab, "float32")
    out, d_logits = assert_within_budget(logits, targets.at[5].set(vocab), options())
    assert np.isnan(out.logprobs[5]) and np.isfinite(out.lse[5]) and np.isfinite(d_logits).all()


def test_a_logprob_near_zero_and_its_gradient_keep_their_digits():
    # p = 1 - 1e-6 and less: z_target - lse cancels, and 1 - p rounds to 0.
    targets = jnp.arange(3)
    logits = jnp.zeros((3, 400)).at[targets, targets].set(jnp.asarray([20.0, 25.0, 40.0]))
    out, d_logits = run(logits, targets, jnp.ones((1, 3)), options(outputs=("logprobs",)))
    expected = -np.log1p(399 * np.exp(-np.asarray([20.0, 25.0, 40.0])))
    np.testing.assert_allclose(out.logprobs, expected, rtol=4e-6)
    np.testing.assert_allclose(d_logits[targets, targets], -np.expm1(expected), rtol=1e-5)


def loss_in_groups(implementation, how, each, logits, targets, mask):
    """A loss of two groups of 16 tokens: one mapped, one in a scan, both with `each` around the op."""

    @each
    def one(logits, targets, mask):
        logprobs = implementation(logits, targets, mask, LogitScalars(), how).logprobs
        return jnp.sum(logprobs * jnp.arange(16.0))

    groups = (logits.reshape(2, 16, -1), targets.reshape(2, 16), mask.reshape(2, 16))
    scanned, _ = jax.lax.scan(lambda total, group: (total + one(*group), None), jnp.zeros(()), groups)
    return jax.vmap(one)(*groups).sum() + scanned


def test_vmap_and_scan():
    inputs = logits_of(32, 256, "float32")
    how = options(outputs=("logprobs",))
    ours, plain = (
        compiled(jax.value_and_grad(functools.partial(loss_in_groups, implementation, how, lambda f: f)))(*inputs)
        for implementation in (token_stats_pallas_tpu, token_stats_reference)
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), ours, plain)


def test_remat_lowers_for_a_tpu():
    # JAX's interpreter has effects, which remat refuses.
    loss = functools.partial(loss_in_groups, token_stats_pallas_tpu, options(None), jax.checkpoint)
    traced = jax.jit(jax.value_and_grad(loss)).trace(*logits_of(32, 256, "float32"))
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_the_backward_pass_runs_only_where_something_flows():
    logits, targets, _ = logits_of(16, 128, "float32")

    def kernels(wanted):
        def loss(logits):
            out = token_stats_pallas_tpu(logits, targets, None, LogitScalars(), options(None))
            return sum(getattr(out, name).sum() for name in wanted)

        traced = equations(jax.make_jaxpr(jax.grad(loss))(logits).jaxpr)
        return sum(eqn.primitive.name == "pallas_call" for eqn in traced)

    assert kernels(("lse",)) == 2
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: jax.lax.stop_gradient(x).sum() + 0.0 * x.sum()))(logits)
    assert not any(eqn.primitive.name == "pallas_call" for eqn in equations(jaxpr.jaxpr))


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", (64, 1024)), ("bfloat16", (60, 1030))],
    ids=["everything divides", "nothing divides"],
)
def test_it_lowers_for_a_tpu_and_writes_the_gradient_in_place(dtype, size):
    how = options(None, block_n=32, block_v=512)
    shapes = (
        jax.ShapeDtypeStruct(size, dtype),
        jax.ShapeDtypeStruct(size[:1], jnp.int32),
        jax.ShapeDtypeStruct(size[:1], bool),
        jax.ShapeDtypeStruct((4, size[0]), jnp.float32),
    )
    traced = program(token_stats_pallas_tpu, how, tuple(SCALARS["all"].items()), True).trace(*shapes)
    calls = [eqn for eqn in equations(traced.jaxpr.jaxpr) if eqn.primitive.name == "pallas_call"]
    forward, backward = (eqn.params["input_output_aliases"] for eqn in calls)
    assert forward == ()
    ((place, result),) = backward
    assert calls[1].invars[place].aval.shape == size and result == 0
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_other_dtypes_are_refused(x64):
    for dtype, how in [("float16", options()), ("float16", options(None)), ("float64", options(None))]:
        logits, targets, _ = logits_of(4, 5, dtype)
        with pytest.raises(NotImplementedError, match=f"not {dtype}; use implementation='chunked'"):
            token_stats_pallas_tpu(logits, targets, None, LogitScalars(), how)


@pytest.mark.parametrize(
    ("dtype", "sizes", "message"),
    [
        ("bfloat16", {"block_n": 24}, r"block_sizes\['block_n'\] is 24.* multiple of 16 for bfloat16: give 16 or 32"),
        ("float32", {"block_n": 3}, r"block_sizes\['block_n'\] is 3.* multiple of 8 for float32: give 8"),
        ("float32", {"block_v": 200}, r"block_sizes\['block_v'\] is 200.* multiple of 128 .*: give 128 or 256"),
    ],
)
def test_blocks_that_are_no_whole_registers_are_refused(dtype, sizes, message):
    logits, targets, _ = logits_of(4, 5, dtype)
    with pytest.raises(ValueError, match=message):
        token_stats_pallas_tpu(logits, targets, None, LogitScalars(), options(**sizes))


def blocks_taken(sizes, dtype="float32", kind="TPU v6 lite", n=1024, v=151_936):
    """The block of logits of the forward kernel, from the traced program."""
    how = HeadOptions(platform="tpu", device_kind=kind, **sizes)
    shapes = jax.ShapeDtypeStruct((n, v), dtype), jax.ShapeDtypeStruct((n,), "int32")
    traced = jax.make_jaxpr(lambda x, t: token_stats_pallas_tpu(x, t, None, LogitScalars(), how))(*shapes)
    (call,) = [eqn for eqn in equations(traced.jaxpr) if eqn.primitive.name == "pallas_call"]
    refs = [x.aval.shape for x in call.params["jaxpr"].invars if x.aval.dtype == dtype and len(x.aval.shape) == 2]
    return max(refs, key=lambda shape: shape[0] * shape[1])


def test_bytes_bound_a_block_and_its_columns_give_way_first():
    assert blocks_taken({}) == (256, 2048)
    assert blocks_taken({"block_bytes": 4 * 256 * 512}) == (256, 512)
    assert blocks_taken({"block_bytes": 4 * 256 * 600}) == (256, 512)
    assert blocks_taken({"block_bytes": 4 * 40 * 128}) == (40, 128)
    assert blocks_taken({"block_bytes": 4 * 64 * 512, "block_n": 64}) == (64, 512)
    assert blocks_taken({"block_bytes": 4 * 64 * 512, "block_v": 1024}) == (32, 1024)
    assert blocks_taken({"block_bytes": 2**30}) == (256, 2048)


@pytest.mark.parametrize(
    ("sizes", "kind", "message"),
    [
        ({"block_bytes": 4095}, "TPU v6 lite", r"block_bytes=4095; .* 8 x 128, has 4096 bytes of float32 .*'chunked'"),
        (
            {"block_n": 512, "block_v": 16_384},
            "TPU v6 lite",
            r"512 x 16384 float32 logits take 13\d\.\d MiB of VMEM where a v6e has 118\.0; nearest that fit: "
            r"block_n=512, block_v=14\d\d\d; or block_n=4\d\d, block_v=16384",
        ),
        (
            {"block_v": 8192},
            "TPU v4",
            r"256 x 8192 float32 .* where a v4 has 13\.0; .*: block_n=256, block_v=2\d\d\d; or",
        ),
    ],
)
def test_blocks_that_do_not_fit_are_refused_with_the_nearest_that_do(sizes, kind, message):
    with pytest.raises(ValueError, match=message):
        blocks_taken(sizes, kind=kind)


def test_derivatives_that_it_does_not_have_are_refused():
    logits, targets, _ = logits_of(4, 5, "float32")

    def loss(logits, temperature):
        scalars = LogitScalars(temperature=temperature)
        return token_stats_pallas_tpu(logits, targets, None, scalars, options(None)).lse.sum()

    one = jnp.ones(())
    with pytest.raises(NotImplementedError, match="'pallas_tpu' does not differentiate temperature"):
        jax.eval_shape(jax.grad(loss, 1), logits, one)
    with pytest.raises(NotImplementedError, match="'pallas_tpu' has no second derivative"):
        jax.eval_shape(jax.hessian(loss), logits, one)
