"""Error budgets against float64, for every op, implementation, dtype, layout and option; values and all gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless.ops.api import linear_token_stats, token_stats
from logitless.ops.types import OUTPUT_NAMES, Layout
from problems import HERE, LOGITS_HERE, SIZES, assert_in_budget, in_layout, peaked

pytestmark = pytest.mark.rounding

OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 20.0},
    "logit_scale": {"logit_scale": 0.3},
    "bias": {"bias": True},
    "mask": {"mask": True},
    "all": {"temperature": 0.7, "softcap": 20.0, "logit_scale": 1.3, "bias": True, "mask": True},
}
BLOCKS = {
    "own rule": None,
    "ragged blocks": {"block_n": 16, "block_v": 100},
    "tiny blocks": {"block_n": 3, "block_v": 2},
}
CANDIDATES = [name for name in HERE if name != "reference"]


@functools.cache
def program(layout: Layout, option: str, implementation: str, blocks: str):
    """All outputs, and the gradients of hidden, lm_head and bias for one cotangent of each output; compiled once."""
    options = dict(OPTIONS[option])
    takes_bias, takes_mask = options.pop("bias", False), options.pop("mask", False)

    @jax.jit
    def both(problem, cotangents):
        def stats(hidden, lm_head, bias):
            return linear_token_stats(
                hidden,
                lm_head,
                problem.targets,
                outputs=OUTPUT_NAMES,
                layout=layout,
                bias=bias if takes_bias else None,
                mask=problem.mask if takes_mask else None,
                implementation=implementation,
                block_sizes=BLOCKS[blocks],
                **options,
            )

        out, pull = jax.vjp(stats, problem.hidden, in_layout(problem.lm_head, layout), problem.bias)
        return *out, *pull(type(out)(*cotangents))

    return both


def assert_all_in_budget(
    size: tuple[int, int, int], dtype: str, layout: Layout, option: str, implementation: str, blocks: str
) -> None:
    names = (*OUTPUT_NAMES, "d_hidden", "d_lm_head", "d_bias")
    for seed in range(3):
        problem = peaked(*size, dtype, seed)
        cotangents = jnp.asarray(np.random.default_rng(seed).normal(size=(4, problem.targets.size)), jnp.float32)
        ours = program(layout, option, implementation, blocks)(problem, cotangents)
        plain = program(layout, option, "reference", "own rule")(problem, cotangents)
        with jax.enable_x64(True):
            wide = type(problem)(*(x.astype(jnp.float64) if x.dtype.kind in "fV" else x for x in problem))
            oracle = program(layout, option, "reference", "own rule")(wide, cotangents.astype(jnp.float64))
        for name, *values in zip(names, ours, plain, oracle, strict=True):
            assert values[0].dtype == (jnp.float32 if name in OUTPUT_NAMES else problem.hidden.dtype)
            # 256 blocks of 2 columns are 256 float32 partial sums, where plain jnp has one product.
            assert_in_budget(name, *values, ulps=8 if blocks == "tiny blocks" else 4)


@pytest.mark.parametrize("implementation", CANDIDATES)
@pytest.mark.parametrize(
    ("layout", "option"),
    [("VD", option) for option in OPTIONS] + [("DV", option) for option in ("plain", "softcap", "all")],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_options_stay_in_budget_on_ragged_sizes(dtype, layout, option, implementation):
    assert_all_in_budget((37, 24, 301), dtype, layout, option, implementation, "ragged blocks")


@pytest.mark.parametrize("implementation", CANDIDATES)
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_blocks_stay_in_budget(size, blocks, implementation):
    assert_all_in_budget(SIZES[size], "float32", "DV", "all", implementation, blocks)


@pytest.mark.parametrize("implementation", [name for name in LOGITS_HERE if name != "reference"])
@pytest.mark.parametrize("option", ["plain", "temperature", "softcap", "logit_scale", "mask", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_level_stays_in_budget(dtype, option, implementation):
    problem = peaked(37, 24, 301, "float32")
    logits = (problem.hidden @ problem.lm_head.T).astype(dtype)
    cotangents = jnp.asarray(np.random.default_rng(2).normal(size=(4, 37)), jnp.float32)
    options = {key: value for key, value in OPTIONS[option].items() if key != "bias"}
    mask = problem.mask if options.pop("mask", False) else None

    def run(logits, cotangents, **how):
        @jax.jit
        def both(logits):
            stats = functools.partial(token_stats, outputs=OUTPUT_NAMES, mask=mask, **options, **how)
            out, pull = jax.vjp(lambda x: stats(x, problem.targets), logits)
            return *out, *pull(type(out)(*cotangents))

        return both(logits)

    ours = run(logits, cotangents, implementation=implementation, block_sizes={"block_v": 100})
    plain = run(logits, cotangents, implementation="reference")
    with jax.enable_x64(True):
        oracle = run(logits.astype(jnp.float64), cotangents.astype(jnp.float64), implementation="reference")
    for name, *values in zip((*OUTPUT_NAMES, "d_logits"), ours, plain, oracle, strict=True):
        assert_in_budget(name, *values)


@pytest.mark.parametrize("implementation", CANDIDATES)
def test_a_logprob_near_zero_and_its_gradient_keep_their_digits(implementation):
    # p = 1 - 1e-6 and less: z_target - lse cancels, and 1 - p rounds to 0.
    hidden = jnp.eye(3)
    lm_head = jnp.asarray([[14.0, 0.0, 0.0], [0.0, 17.0, 0.0], [0.0, 0.0, 30.0], [0.0, 0.0, 0.0]]).T
    with jax.enable_x64(True):
        others = np.log(3.0) - np.asarray([14.0, 17.0, 30.0])
        expected = -np.log1p(np.exp(others))
        slope = -np.expm1(expected)
    run = functools.partial(
        linear_token_stats, targets=jnp.arange(3), outputs=("logprobs",), implementation=implementation
    )
    np.testing.assert_allclose(run(hidden, lm_head).logprobs, expected, rtol=1e-6)
    # d logprob / d lm_head[i, target i] = hidden * (1 - p)
    d_lm_head = jax.grad(lambda w: run(hidden, w).logprobs.sum())(lm_head)
    np.testing.assert_allclose(np.diag(d_lm_head), slope, rtol=1e-5)


@pytest.mark.parametrize("implementation", CANDIDATES)
def test_the_head_gradient_does_not_worsen_with_the_number_of_blocks(implementation):
    problem = peaked(1024, 8, 64, "bfloat16")

    def head_gradient(problem, block_n):
        def loss(w):
            stats = linear_token_stats(
                problem.hidden,
                w,
                problem.targets,
                outputs=("logprobs",),
                layout="VD",
                implementation=implementation if block_n else "reference",
                block_sizes={"block_n": block_n} if block_n else None,
            )
            return stats.logprobs.sum()

        return np.asarray(jax.jit(jax.grad(loss))(problem.lm_head), np.float64)

    with jax.enable_x64(True):
        wide = problem._replace(hidden=problem.hidden.astype(jnp.float64), lm_head=problem.lm_head.astype(jnp.float64))
        oracle = head_gradient(wide, None)
    errors = [np.abs(head_gradient(problem, n) - oracle).max() for n in (1024, 256, 32, 1)]
    assert max(errors) <= 1.05 * errors[0], errors
