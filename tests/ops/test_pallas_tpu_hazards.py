"""What the TPU kernels copy by themselves, skip, and share between cores: simulated, with races found."""

import collections
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from logitless.ops import pallas_tpu
from tpu_interpreter import SCALARS, Case, Given, check, given, run

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


@both_dmas
@pytest.mark.parametrize(
    ("by", "size"),
    [
        ("mask", (128, 24, 700)),
        ("cotangents", (128, 24, 768)),
        pytest.param("mask", (128, 24, 768), marks=slow),
        pytest.param("cotangents", (128, 24, 700), marks=slow),
    ],
    ids=str,
)
def test_any_number_of_token_blocks_between_two_visits_of_a_block(by, size, dma):
    """A block of `d_hidden` is read again after 1 to 8 steps, or stays in VMEM: one program, the count at run time."""
    problem = given(*size, "float32", "bias", *(["mask"] if by == "mask" else []), scalars={"logit_scale": 0.5})
    for count in (0, 7, 16, 32, 48, 64, 75, 128):
        out = check(Case(dma=dma), first_tokens(problem, count, by))
        assert (out["d_hidden"] != 0).any(axis=1).sum() == count


@both_dmas
@slow
@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 8])
def test_a_fixed_number_of_token_blocks(blocks, dma):
    check(Case(dma=dma, layout="DV"), given(16 * blocks, 24, 700))


@both_dmas
@slow
@pytest.mark.parametrize("wrt", [("hidden",), ("lm_head",), ("hidden", "bias")], ids=str)
def test_a_run_time_number_of_token_blocks_for_some_gradients(wrt, dma):
    problem = given(75, 24, 640, "bfloat16", "bias", scalars=SCALARS)
    for count in (0, 16, 32, 48, 64, 75):
        check(Case(dma=dma, wrt=wrt), first_tokens(problem, count, "cotangents"))


@pytest.fixture
def two_cores(monkeypatch):
    """A chip whose two cores share a device's memory."""
    of_one = pallas_tpu.blocks_of

    def of_two(*args):
        return replace(of_one(*args), cores=2)

    monkeypatch.setattr(pallas_tpu, "blocks_of", of_two)


@pytest.mark.parametrize(
    ("size", "layout", "dma"),
    [
        ((45, 24, 700), "VD", "on_wait"),
        ((64, 24, 512), "DV", "eager"),
        *[
            pytest.param((n, 24, v), layout, dma, marks=slow)
            for n, v, layout, dma in [
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
    check(case, first_tokens(problem, size[0] - 9, "mask"))


@slow
def test_two_cores_with_few_tokens_or_none(two_cores):
    for count in (0, 3, 20):
        check(Case(cores=2), first_tokens(given(75, 24, 700, "float32", "bias", "mask"), count, "mask"))


@pytest.mark.parametrize(
    ("wrt", "v"),
    [
        (("hidden",), 300),
        pytest.param(("hidden",), 512, marks=slow),
        pytest.param(("lm_head",), 700, marks=slow),
        pytest.param(("bias",), 700, marks=slow),
    ],
    ids=str,
)
def test_two_cores_for_some_gradients(two_cores, wrt, v):
    case = Case(cores=2, wrt=wrt)
    problem = given(75, 24, v, "bfloat16", "bias")
    for count in (33,) if v == 300 else (0, 75):
        check(case, first_tokens(problem, count, "cotangents"))


class Steps:
    """Counts the steps of every grid as the simulator takes them."""

    def __init__(self) -> None:
        self.taken: collections.Counter = collections.Counter()

    def __call__(self, token, point, core):
        self.taken[tuple(int(x) for x in point)] += 1
        return token


@pytest.mark.parametrize("wrt", [("hidden", "lm_head", "bias"), ("hidden",)], ids=str)
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
