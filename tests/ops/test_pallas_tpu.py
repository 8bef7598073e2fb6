"""The TPU kernels in JAX's simulation of a TPU: every option, size and dtype within its budget of error, no race."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless.ops.chunked import linear_token_stats_chunked
from logitless.ops.pallas_tpu import linear_token_stats_pallas_tpu
from logitless.ops.types import OUTPUT_NAMES
from problems import SIZES, equations
from tpu_interpreter import INPUTS, SCALARS, Case, Given, Steps, assert_within_budget, given, run

slow = pytest.mark.slow
RAGGED = (37, 24, 301)
# Its head leaves the chip by the kernel's own copies, which take whole registers of columns.
STAGED = (37, 24, 640)
FLATTER = {"logit_scale": 0.3}


def with_impossible_columns(given: Given, *spans: tuple[int, int], targets: bool = False) -> Given:
    """Columns at -inf: none that is a target, unless asked for."""
    columns = np.concatenate([np.arange(*span) for span in spans])
    p = given.problem
    moved = p.targets
    if not targets:
        free = np.setdiff1d(np.arange(p.lm_head.shape[0]), columns)
        other = jnp.asarray(np.resize(free, p.targets.shape), p.targets.dtype)
        moved = jnp.where(np.isin(p.targets, columns), other, p.targets)
    return given.replace(bias=p.bias.at[columns].set(-jnp.inf), targets=moved)


def in_eighths(given: Given) -> Given:
    """Products that are exact in every dtype, so that all who round them round the same number."""
    return given.replace(**{name: jnp.round(getattr(given.problem, name) * 8) / 8 for name in INPUTS})


@pytest.mark.parametrize(
    ("dtype", "layout", "dma", "size"),
    [
        ("float32", "VD", "on_wait", RAGGED),
        ("bfloat16", "DV", "eager", RAGGED),
        ("float32", "DV", "on_wait", STAGED),
        ("bfloat16", "VD", "eager", STAGED),
        *[
            pytest.param(dtype, layout, dma, size, marks=slow)
            for dtype, layout, dma, size in [
                ("float32", "DV", "eager", RAGGED),
                ("bfloat16", "VD", "on_wait", RAGGED),
                ("float32", "VD", "eager", STAGED),
                ("bfloat16", "DV", "on_wait", STAGED),
            ]
        ],
    ],
)
def test_all_options_together(dtype, layout, dma, size):
    case = Case(layout=layout, dma=dma)
    problem = given(*size, dtype, "bias", "mask", scalars=SCALARS)
    assert_within_budget(case, with_impossible_columns(problem, (3, 5)))


@pytest.mark.parametrize(
    ("takes", "scalars"),
    [
        ((), {}),
        ((), {"softcap": 20.0}),
        (("mask",), {"temperature": 0.7}),
        (("bias",), {"logit_scale": 0.3}),
        *[
            pytest.param(takes, scalars, marks=slow)
            for takes, scalars in [
                (("bias",), {"softcap": 20.0, "temperature": 1.4}),
                (("bias",), {}),
                ((), {"temperature": 0.7}),
                ((), {"logit_scale": 0.3}),
                ((), SCALARS),
            ]
        ],
    ],
    ids=str,
)
def test_one_option_at_a_time(takes, scalars):
    assert_within_budget(Case(layout="DV", dma="eager"), given(*RAGGED, "float32", *takes, scalars=scalars))


@pytest.mark.parametrize(
    "size",
    [
        SIZES["smaller than any block"],
        SIZES["one token"],
        (17, 24, 257),
        (33, 130, 600),
        *[
            pytest.param(size, marks=slow)
            for size in [(16, 24, 256), (31, 3, 130), (48, 130, 7), (47, 3, 700), (40, 24, 384), (16, 130, 257)]
        ],
    ],
    ids=str,
)
def test_sizes_that_no_block_divides(size):
    # Of arrays of a few elements, plain jnp is at times right by luck.
    few = {"ulps": 16.0, "by_row": False} if size[0] * size[2] < 1000 else {}
    assert_within_budget(
        Case(layout="VD"), given(*size, "float32", "bias", "mask", scalars={"logit_scale": 0.5}), **few
    )


@pytest.mark.parametrize("outputs", [("logprobs",), OUTPUT_NAMES], ids=str)
def test_a_block_of_tokens_in_parts(outputs):
    # 565 rows: blocks of 560 are made in a part of 288 and one of 272.
    assert_within_budget(
        Case(layout="VD", blocks=(560, 512), outputs=outputs), given(565, 24, 600, "float32", "bias", "mask")
    )


@slow
@pytest.mark.parametrize("layout", ["VD", "DV"])
@pytest.mark.parametrize("size", [(5, 3, 7), (37, 130, 2500)], ids=str)
def test_blocks_by_their_own_rule(size, layout):
    assert_within_budget(Case(layout=layout, blocks=(None, None)), given(*size, "bfloat16", "bias", "mask"))


@pytest.mark.parametrize("layout", ["VD", pytest.param("DV", marks=slow)])
def test_float64(x64, layout):
    assert_within_budget(Case(layout=layout), given(*RAGGED, "float64", "bias", "mask", scalars=SCALARS))


@pytest.mark.parametrize(
    ("hidden", "lm_head", "layout"),
    [
        pytest.param("bfloat16", "float32", "DV", marks=slow),
        # The bias alone in float32: its gradient is summed before any cast.
        ("bfloat16", "bfloat16", "VD"),
        pytest.param("float32", "bfloat16", "VD", marks=slow),
        pytest.param("bfloat16", "float32", "VD", marks=slow),
        pytest.param("float32", "bfloat16", "DV", marks=slow),
    ],
)
def test_mixed_dtypes(hidden, lm_head, layout):
    problem = given(*RAGGED, "float32", "bias")
    head = problem.problem.lm_head.astype(lm_head)
    out = assert_within_budget(
        Case(layout=layout), problem.replace(hidden=problem.problem.hidden.astype(hidden), lm_head=head)
    )
    assert out["d_hidden"].dtype == hidden and out["d_lm_head"].dtype == lm_head
    assert out["d_bias"].dtype == "float32"


@pytest.mark.parametrize("layout", ["VD", pytest.param("DV", marks=slow)])
def test_logits_rounded_to_bfloat16(layout):
    problem = in_eighths(given(*RAGGED, "float32", "bias"))
    case = Case(layout=layout, logits_dtype="bfloat16")
    # JAX's own gradient would round the gradient of the logits as well.
    rounded = assert_within_budget(case, problem, reference=linear_token_stats_chunked)
    assert_within_budget(replace(case, wrt=()), problem)
    assert not np.allclose(rounded["lse"], run(Case(layout=layout, wrt=()), problem)["lse"], rtol=1e-5)


@pytest.mark.parametrize(
    "used",
    [
        ("logprobs",),
        ("entropy",),
        ("lse", "mean_logits"),
        pytest.param(("lse",), marks=slow),
        pytest.param(("mean_logits",), marks=slow),
    ],
    ids=str,
)
def test_a_cotangent_of_one_statistic(used):
    # Flatter, for 1 - p of 1e-18 is beyond the oracle too, and nothing else in a row covers it.
    assert_within_budget(Case(used=used, layout="DV"), given(*RAGGED, "float32", "bias", "mask", scalars=FLATTER))


@slow
@pytest.mark.parametrize("output", OUTPUT_NAMES)
def test_one_statistic_alone_is_asked_for(output):
    assert_within_budget(Case(outputs=(output,)), given(*RAGGED, "bfloat16", "bias", scalars={"softcap": 20.0}))


@pytest.mark.parametrize(
    ("wrt", "size", "layout"),
    [
        (("hidden",), RAGGED, "VD"),
        (("hidden",), STAGED, "DV"),
        (("lm_head",), STAGED, "VD"),
        (("bias",), RAGGED, "DV"),
        *[
            pytest.param(wrt, size, layout, marks=slow)
            for wrt, size, layout in [
                (("hidden",), RAGGED, "DV"),
                (("lm_head",), RAGGED, "DV"),
                (("hidden", "bias"), STAGED, "VD"),
                (("lm_head", "bias"), RAGGED, "VD"),
                (("hidden", "lm_head"), STAGED, "DV"),
            ]
        ],
    ],
    ids=str,
)
def test_what_is_frozen_is_left_out(wrt, size, layout):
    problem = with_impossible_columns(given(*size, "bfloat16", "bias", "mask", scalars=SCALARS), (3, 5))
    out = assert_within_budget(Case(wrt=wrt, layout=layout), problem)
    assert set(out) == {*OUTPUT_NAMES, *(f"d_{name}" for name in wrt)}


@pytest.mark.parametrize(
    ("last", "whole", "dtype", "layout"),
    [
        (300, 384, "float32", "DV"),
        (128, 128, "bfloat16", "VD"),
        *[
            pytest.param(*case, marks=slow)
            for case in [
                (300, 384, "bfloat16", "VD"),
                (384, 384, "float32", "VD"),
                (384, 384, "bfloat16", "DV"),
                (3, 128, "float32", "VD"),
                (512, 512, "bfloat16", "DV"),
            ]
        ],
    ],
)
def test_the_last_block_of_a_frozen_head_ends_anywhere(last, whole, dtype, layout):
    """Blocks of 512 columns: the second product of the last takes whole registers of those that there are."""
    steps = Steps()
    case = Case(wrt=("hidden",), outputs=("logprobs", "lse"), blocks=(16, 512), layout=layout, recorder=steps)
    problem = given(37, 24, 512 + last, dtype, "bias", scalars=SCALARS)
    assert_within_budget(case, problem)
    # One sweep of 3 x 2 blocks: there is no other kernel for the gradient.
    assert steps.taken.total() == 6
    # Where the kernel collects the targets' columns as well, it takes 256 at a time.
    collected = {(16, 256)} if layout == "DV" else set()
    assert second_products(case, problem) == {(16, 512), (16, whole)} | collected


def second_products(case: Case, given: Given) -> set[tuple[int, ...]]:
    """Shapes of the weights that a sweep multiplies with the head."""
    hidden, lm_head, bias, targets, mask, scalars, _ = given.arguments(case)

    def logprobs(hidden):
        stats = linear_token_stats_pallas_tpu(hidden, lm_head, bias, targets, mask, scalars, case.options())
        return stats.logprobs.sum()

    dots = [x for x in equations(jax.make_jaxpr(jax.grad(logprobs))(hidden).jaxpr) if x.primitive.name == "dot_general"]
    weights = [x.invars[0].aval.shape for x in dots if x.outvars[0].aval.shape[1] == given.problem.hidden.shape[1]]
    return {shape for shape in weights if shape[0] == case.blocks[0]}


@pytest.mark.parametrize(
    ("size", "layout", "dtype", "scalars"),
    [
        (RAGGED, "DV", "float32", FLATTER),
        (STAGED, "VD", "bfloat16", SCALARS),
        pytest.param(RAGGED, "VD", "bfloat16", FLATTER, marks=slow),
        pytest.param(STAGED, "DV", "float32", SCALARS, marks=slow),
    ],
    ids=["no softcap, DV", "softcap, VD", "no softcap, VD", "softcap, DV"],
)
def test_a_frozen_head_in_one_sweep(size, layout, dtype, scalars):
    """Every statistic is asked for, and two have a cotangent; blocks have no finite logit."""
    case = Case(wrt=("hidden",), used=("logprobs", "lse"), layout=layout)
    problem = given(*size, dtype, "bias", "mask", scalars=scalars)
    for spans in ([(3, 5)], [(256, size[2])], [(0, 256)], [(256, 512)] if size[2] > 512 else [(256, 300)]):
        assert_within_budget(case, with_impossible_columns(problem, *spans))


@pytest.mark.parametrize("scalars", [FLATTER, pytest.param({"softcap": 10.0, **FLATTER}, marks=slow)], ids=str)
@pytest.mark.parametrize("targets", [False, True], ids=["", "targets among them"])
def test_blocks_of_the_vocabulary_that_are_minus_inf(targets, scalars):
    """The first, one between, the last, and all three: one program."""
    outputs = ("logprobs", "lse", "entropy")
    for spans in ([(0, 256)], [(256, 512)], [(512, 700)], [(0, 300), (512, 700)], [(10, 690)]):
        problem = with_impossible_columns(
            given(37, 24, 700, "float32", "bias", scalars=scalars), *spans, targets=targets
        )
        out = assert_within_budget(Case(outputs=outputs), problem)
        for first, end in spans:
            assert (out["d_lm_head"][first:end] == 0).all() and (out["d_bias"][first:end] == 0).all()
        columns = np.asarray(problem.problem.targets)
        impossible = np.isneginf(np.asarray(problem.problem.bias))[columns]
        assert impossible.any() == targets and np.array_equal(np.isneginf(out["logprobs"]), impossible)


def test_a_row_without_a_finite_logit_is_nan_and_a_masked_one_is_not():
    problem = given(5, 24, 300, "float32", "bias", "mask")
    problem = problem.replace(bias=jnp.full(300, -jnp.inf), mask=jnp.asarray([True, False, True, False, True]))
    out = run(Case(wrt=(), outputs=("logprobs", "lse", "entropy")), problem)
    for value in out.values():
        np.testing.assert_array_equal(np.isnan(value), [True, False, True, False, True])
        assert (value[[1, 3]] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=slow)])
def test_masked_tokens_hold_nan_and_some_others_have_no_cotangent(dtype):
    """No token, one, half, all of them: one program."""
    problem, case = given(40, 24, 301, dtype, "bias", "mask"), Case(layout="DV")
    none = np.zeros(40, bool)
    for mask in (none, none | (np.arange(40) == 21), np.arange(40) % 2 == 0, ~none):
        hidden = jnp.where(mask[:, None], problem.problem.hidden, jnp.asarray(jnp.nan, dtype))
        targets = jnp.where(mask, problem.problem.targets, 301)
        masked = problem.replace(mask=jnp.asarray(mask), hidden=hidden, targets=targets)
        for silent in (none, np.arange(40) < 13):
            masked.cotangents = np.where(silent, 0.0, problem.cotangents)
            out = assert_within_budget(case, masked)
            assert all((out[name][~mask] == 0).all() for name in OUTPUT_NAMES)
            assert (out["d_hidden"][~mask | silent] == 0).all()
            assert (out["d_lm_head"] != 0).any() == (mask & ~silent).any()


def test_tokens_without_a_cotangent_may_not_even_be_read():
    problem = given(40, 24, 301, "float32", "bias")
    problem.cotangents = np.where(np.arange(40) < 13, 0.0, problem.cotangents)
    clean = run(Case(), problem)
    spoilt = run(Case(), problem.replace(hidden=problem.problem.hidden.at[:13].set(jnp.nan)))
    for name in ("d_hidden", "d_lm_head", "d_bias"):
        np.testing.assert_array_equal(spoilt[name], clean[name])


def test_targets_outside_the_vocabulary_are_nan_and_send_nothing_back():
    problem = given(37, 24, 301, "float32", "bias")
    outside = np.arange(37) % 5 == 0
    problem = problem.replace(targets=jnp.where(outside, 301, problem.problem.targets))
    out = assert_within_budget(Case(), problem)
    np.testing.assert_array_equal(np.isnan(out["logprobs"]), outside)
    alone = run(Case(used=("logprobs",)), problem)
    assert (alone["d_hidden"][outside] == 0).all() and (alone["d_hidden"][~outside] != 0).any(axis=1).all()


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=slow)])
@pytest.mark.parametrize("layout", ["DV", pytest.param("VD", marks=slow)])
def test_a_token_of_probability_0_999_keeps_its_gradient(dtype, layout):
    """1 - p is 9e-4: p rounded to bfloat16 before the subtraction would leave 0 or 4e-3 of it."""
    vocab, target = 33, 5
    rest = np.random.default_rng(0).integers(-8, 9, (vocab, 7)) / 8
    head = np.concatenate([(np.arange(vocab) == target)[:, None], rest], axis=1)
    problem = given(1, 8, vocab, dtype)
    problem = problem.replace(
        hidden=jnp.asarray([[10.5] + [0.0] * 7], dtype),
        lm_head=jnp.asarray(head, dtype),
        targets=jnp.asarray([target], jnp.int32),
    )
    problem.cotangents = np.ones((4, 1))
    out = run(Case(layout=layout, used=("logprobs",), wrt=("hidden", "lm_head")), problem)
    missing = (vocab - 1) / (np.exp(10.5) + vocab - 1)
    d_logits = np.where(np.arange(vocab) == target, missing, -missing / (vocab - 1))
    eps = float(jnp.finfo(dtype).eps)
    d_lm_head = out["d_lm_head"] if layout == "VD" else out["d_lm_head"].T
    close = {"rtol": 2 * eps, "atol": 2 * eps * missing}
    np.testing.assert_allclose(out["d_hidden"][0].astype(np.float64), d_logits @ head, **close)
    np.testing.assert_allclose(d_lm_head[:, 0].astype(np.float64), d_logits * 10.5, rtol=2 * eps + 1e-5)


def test_targets_at_the_edges_of_blocks_of_the_vocabulary():
    """Blocks of tokens that have one target each: the first and the last column of a block, and of the vocabulary."""
    edges = np.repeat([0, 255, 256, 511, 512, 699], 16)
    problem = given(96, 24, 700, "float32")
    assert_within_budget(Case(wrt=()), problem.replace(targets=jnp.asarray(edges, jnp.int32)))


def test_a_bias_whose_exponential_overflows_leaves_empty_places_at_zero():
    """In a place without a token its logit is the bias itself, and the exponential of that times 0 is no zero."""
    problem = given(37, 24, 301, "float32", "bias")
    assert_within_budget(Case(dma="eager"), problem.replace(bias=problem.problem.bias.at[7].set(200.0)))
