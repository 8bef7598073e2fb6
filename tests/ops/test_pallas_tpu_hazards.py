"""What the TPU kernels copy by themselves, skip, and share between cores: simulated, with races found."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless.ops import pallas_tpu
from logitless.ops.derivatives import Differentiated, HeadInputs, HeadResiduals
from logitless.ops.pallas_tpu import PASSES
from logitless.ops.softmax import finish
from logitless.ops.types import TokenStats
from tpu_interpreter import SCALARS, Case, Given, Steps, assert_within_budget, given, run, watched

slow = pytest.mark.slow
both_dmas = pytest.mark.parametrize("dma", ["eager", "on_wait"])


def first_tokens(problem: Given, count: int, by: str) -> Given:
    """Only `count` tokens that are active, by the mask or by their cotangents, spread over all."""
    n = problem.problem.targets.size
    active = np.zeros(n, bool)
    active[np.random.default_rng(count).permutation(n)[:count]] = True
    if by == "mask":
        return problem.replace(mask=jnp.asarray(active))
    problem = replace(problem)
    problem.cotangents = np.where(active, problem.cotangents, 0.0)
    return problem


@pytest.mark.parametrize(
    ("by", "size", "dma"),
    [
        ("mask", (128, 24, 700), "on_wait"),
        ("cotangents", (128, 24, 768), "eager"),
        pytest.param("mask", (128, 24, 768), "eager", marks=slow),
        pytest.param("cotangents", (128, 24, 700), "on_wait", marks=slow),
    ],
    ids=str,
)
def test_any_number_of_token_blocks_between_two_visits_of_a_block(by, size, dma):
    """A block of `d_hidden` is read again after 1 to 8 steps, or stays in VMEM: one program, the count at run time."""
    problem = given(*size, "float32", "bias", *(["mask"] if by == "mask" else []), scalars={"logit_scale": 0.5})
    for count in (0, 7, 32, 48, 64, 75, 128):
        out = assert_within_budget(Case(dma=dma), first_tokens(problem, count, by))
        assert (out["d_hidden"] != 0).any(axis=1).sum() == count


@both_dmas
@slow
@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 8])
def test_a_fixed_number_of_token_blocks(blocks, dma):
    assert_within_budget(Case(dma=dma, layout="DV"), given(16 * blocks, 24, 700))


@both_dmas
@slow
@pytest.mark.parametrize("wrt", [("hidden",), ("lm_head",), ("hidden", "bias")], ids=str)
def test_a_run_time_number_of_token_blocks_for_some_gradients(wrt, dma):
    problem = given(75, 24, 640, "bfloat16", "bias", scalars=SCALARS)
    for count in (0, 16, 32, 48, 64, 75):
        assert_within_budget(Case(dma=dma, wrt=wrt), first_tokens(problem, count, "cotangents"))


@pytest.mark.parametrize(("v", "layout"), [(896, "DV"), pytest.param(1920, "VD", marks=slow)])
def test_a_block_of_the_head_that_leaves_in_several_copies(v, layout):
    """Two staging buffers and four copies a block: a buffer is filled again only once its copy has ended."""
    assert_within_budget(Case(wrt=("lm_head",), blocks=(16, 1024), layout=layout), given(37, 24, v))


@both_dmas
@pytest.mark.parametrize(("v", "layout"), [(896, "DV"), (1936, "VD"), pytest.param(1000, "DV", marks=slow)])
def test_the_gradient_of_the_head_is_added_to_one_that_stands_there(v, layout, dma):
    """A buffer is read into, added to and written; 1936 rows end within a block, 1000 columns within a register."""
    case = Case(layout=layout, blocks=(16, 1024), outputs=("logprobs",), dma=dma)
    hidden, lm_head, bias, targets, mask, scalars, cotangents = given(37, 24, v).arguments(case)
    inputs, options = (
        HeadInputs(hidden, lm_head, bias, targets, mask, scalars),
        replace(case.options(), wide_gradients=True),
    )
    before = jnp.asarray(np.random.default_rng(1).normal(size=lm_head.shape), jnp.float32)
    wanted = Differentiated((jnp.zeros((), bool), jnp.zeros((), bool), jnp.zeros((), jnp.int8)))

    @jax.jit
    def both(inputs, before):
        running = PASSES.sums(inputs, options, ("logprobs",))
        residuals = HeadResiduals(inputs, *finish(running, targets < v, v, ("logprobs",)), None, wanted)
        args = residuals, TokenStats(logprobs=cotangents[0]), cotangents[0] > 0, options
        return PASSES.gradients(*args), PASSES.gradients(*args, before)

    with watched():
        alone, onto = jax.tree.map(np.asarray, both(inputs, before))
    assert alone.lm_head.dtype == np.float32 and np.abs(alone.lm_head).max() > 0.1
    assert np.array_equal(onto.lm_head, np.asarray(before) + alone.lm_head)
    assert np.array_equal(onto.hidden, alone.hidden)


@pytest.fixture
def two_cores(monkeypatch):
    """A chip whose two cores share a device's memory."""
    of_one = pallas_tpu.blocks_of

    def of_two(*args):
        return replace(of_one(*args), cores=2)

    monkeypatch.setattr(pallas_tpu, "blocks_of", of_two)


@pytest.mark.rounding
@pytest.mark.parametrize(
    ("size", "layout", "dma"),
    [
        ((45, 24, 700), "VD", "on_wait"),
        *[
            pytest.param((n, 24, v), layout, dma, marks=slow)
            for n, v, layout, dma in [
                (64, 512, "DV", "eager"),
                (75, 768, "VD", "eager"),
                (75, 700, "DV", "on_wait"),
                (64, 1024, "VD", "on_wait"),
                (64, 1000, "DV", "eager"),
                (16, 200, "VD", "on_wait"),
                (16, 700, "VD", "eager"),
            ]
        ],
    ],
    ids=str,
)
def test_two_cores_with_odd_and_even_numbers_of_blocks(two_cores, size, layout, dma):
    case = Case(layout=layout, dma=dma, cores=2)
    problem = given(*size, "float32", "bias", "mask", scalars=SCALARS)
    # The simulated cores wait for each other in turns: a run takes as long as ten of one core.
    assert_within_budget(case, first_tokens(problem, size[0] - 9, "mask"))


@slow
def test_two_cores_with_few_tokens_or_none(two_cores):
    for count in (0, 3, 20):
        assert_within_budget(Case(cores=2), first_tokens(given(75, 24, 700, "float32", "bias", "mask"), count, "mask"))


@pytest.mark.parametrize(
    ("wrt", "v", "used"),
    [
        (("hidden",), 300, None),
        pytest.param(("hidden",), 512, None, marks=slow),
        pytest.param(("hidden",), 700, ("logprobs",), marks=slow, id="sweep"),
        pytest.param(("lm_head",), 700, None, marks=slow),
        pytest.param(("bias",), 700, None, marks=slow),
    ],
    ids=str,
)
def test_two_cores_for_some_gradients(two_cores, wrt, v, used):
    case = Case(cores=2, wrt=wrt, used=used)
    problem = given(75, 24, v, "bfloat16", "bias")
    for count in (33,) if v == 300 else (0, 75):
        assert_within_budget(case, first_tokens(problem, count, "cotangents"))


@pytest.mark.parametrize("wrt", [("hidden", "lm_head", "bias"), pytest.param(("hidden",), marks=slow)], ids=str)
def test_blocks_without_an_active_token_take_no_step(wrt):
    """8 blocks of tokens, 3 of the vocabulary: whoever masks half of the tokens pays for half of the steps."""
    steps = Steps()
    case = Case(recorder=steps, wrt=wrt)

    def count(problem: Given) -> int:
        steps.taken.clear()
        run(case, problem)
        return steps.taken.total()

    masked, plain = (given(128, 24, 700, "float32", "bias", *takes) for takes in (("mask",), ()))
    forward, backward = 8 * 3, 8 * 3
    assert count(plain) == forward + backward
    assert count(first_tokens(masked, 128, "mask")) == forward + backward
    assert count(first_tokens(masked, 64, "mask")) == (forward + backward) // 2
    assert count(first_tokens(masked, 65, "mask")) == 2 * 5 * 3
    assert count(first_tokens(plain, 64, "cotangents")) == forward + backward // 2
    # The head's gradient is written in any case, by one block of tokens; that of the hidden states needs none.
    least = 3 if "lm_head" in wrt else 0
    assert count(first_tokens(plain, 0, "cotangents")) == forward + least
    assert count(first_tokens(masked, 0, "mask")) == least
