"""Sharded heads through the real compiler of a TPU, for chips that are not here: what is gathered, and how much."""

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from logitless import HeadSharding, head_strategy, linear_logprobs
from logitless.bench.errors import BenchError
from logitless.bench.plan_cases import PlanConfig, PlanVariant, cases_of, program, strategy_of
from logitless.bench.shardings import MeshSharding
from logitless.plan import plan_function

libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="the compiler: pip install '.[tpu]'")


def step_of(
    mesh: AbstractMesh, sharding: HeadSharding, implementation: str, tokens: int, d: int, v: int
) -> tuple[Any, Any]:
    """A loss with both gradients, and its arguments; `tokens` on each device."""

    def shape(dims: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

    def loss(hidden, lm_head, targets):
        options: Any = {"layout": "VD", "implementation": implementation, "sharding": sharding}
        return linear_logprobs(hidden, lm_head, targets, **options).sum()

    count = tokens * sharding.size(sharding.token_axes)
    args = (
        shape((count, d), jnp.bfloat16, sharding.of_rows(ndim=1)),
        shape((v, d), jnp.bfloat16, sharding.head_spec("VD")),
        shape((count,), jnp.int32, sharding.token_spec),
    )
    return jax.value_and_grad(loss, (0, 1)), args


@pytest.mark.slow
@libtpu
@pytest.mark.parametrize(
    ("where", "axes", "head", "implementation"),
    [
        ("v6e:2x4", (8, 1), "gather_tokens", "pallas_tpu"),
        ("v6e:2x4", (8, 1), "gather_head", "pallas_tpu"),
        ("v6e:2x4", (8, 1), "gather_tokens", "chunked"),
        ("v6e:2x4", (8, 1), "gather_head", "chunked"),
        ("v6e:4x4", (8, 2), "gather_tokens", "pallas_tpu"),
        ("v6e:4x4", (8, 2), "gather_head", "chunked"),
    ],
)
def test_both_strategies_compile_and_bring_what_is_said(where, axes, head, implementation):
    mesh = AbstractMesh(axes, ("fsdp", "tensor"))
    sharding = HeadSharding(mesh, tokens=("fsdp",), vocab=("tensor", "fsdp"), head=head)  # pyright: ignore[reportArgumentType]
    tokens, d, v = 512, 512, 2048 * axes[0] * axes[1]
    fn, args = step_of(mesh, sharding, implementation, tokens, d, v)
    plan = plan_function(fn, args, where)
    assert plan.reason is None
    # Over `tensor` the gradient of the hidden states is summed, in float32 or as XLA casts it, and numbers of tokens.
    said = head_strategy(sharding, tokens * 8, d, v).bytes[head]
    summed = 2 * 4 * tokens * d * (axes[1] - 1)
    # What comes in one piece XLA keeps from the forward pass: a quarter of the bytes less.
    assert 0.74 * said <= plan.collective_bytes <= 1.1 * said + 1.1 * summed + 64 * 8 * tokens * 4
    # Neither the head nor the tokens are whole.
    own = d * (2 * tokens + v // (axes[0] * axes[1])) * 4
    assert plan.temp_bytes < own + 8 * d * 2 * max(tokens, v // (axes[0] * axes[1])) + 32 * 2**20


CONFIG: dict[str, Any] = {
    "name": "p",
    "topologies": ("v6e:2x4",),
    "hidden_size": 64,
    "vocab_size": 1000,
    "tokens": (64,),
    "sequences": 4,
}


def test_a_variant_says_how_tokens_and_head_lie():
    laid = MeshSharding({"fsdp": 4, "tensor": 2}, ("fsdp",), ("tensor", "fsdp"))
    (case,) = cases_of(PlanConfig(variants=(PlanVariant("both", sharding=laid),), **CONFIG))
    _, (hidden, lm_head, targets, *_) = program(case, "chunked", 4, 16)
    assert hidden.shape == (16, 16, 64) and targets.shape == (16, 16)
    assert hidden.sharding.spec == P(("fsdp",)) and lm_head.sharding.spec == P(None, ("tensor", "fsdp"))
    # 125 columns a part end within a register; the parts are padded, all alike.
    assert lm_head.shape == (64, 1000)
    strategy = strategy_of(case, 64)
    assert strategy is not None and strategy.name == "gather_tokens"
    assert strategy.bytes == {"gather_tokens": 3 * 64 * 64 * 8, "gather_head": 3 * 125 * 64 * 8}
    (plain,) = cases_of(PlanConfig(**CONFIG))
    assert strategy_of(plain, 64) is None


def test_a_vocabulary_that_no_part_divides_is_padded_to_whole_registers():
    laid = MeshSharding({"fsdp": 8}, ("fsdp",), ("fsdp",))
    config: dict[str, Any] = {**CONFIG, "vocab_size": 1001}
    (case,) = cases_of(PlanConfig(variants=(PlanVariant("fsdp", sharding=laid),), **config))
    _, (_, lm_head, *_) = program(case, "chunked", 4, 16)
    assert lm_head.shape == (64, 8 * 128)


def test_a_mesh_that_the_topology_does_not_make():
    wrong = (PlanVariant("fsdp", sharding=MeshSharding({"fsdp": 4}, ("fsdp",), ("fsdp",))),)
    with pytest.raises(BenchError, match=r"variant 'fsdp' on v6e:2x4: axes {fsdp: 4} make 4 devices, and .* 8"):
        PlanConfig(variants=wrong, **CONFIG)
