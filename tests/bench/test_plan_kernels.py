"""Variants of a planned loss and the table of its kernels, from records made by hand."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless import cli
from logitless.bench.errors import BenchError
from logitless.bench.plan_cases import PlanConfig, PlanVariant, cases_of, donated, program
from logitless.bench.plan_kernels import has_kernels, kernels_markdown
from logitless.ops.pallas_tpu_blocks import share_with_targets


def case(**variant):
    found = PlanVariant(**variant)
    config = PlanConfig("toy", ("v6e",), hidden_size=16, vocab_size=300, variants=(found,))
    return cases_of(config)[0]


def record(implementation="pallas_tpu", kernels=(), variant=None, **plan):
    shown = {"name": "", "differentiate": ["hidden", "lm_head"], "level": "hidden", "masked": 0.0, "flat": 0.0}
    about = {"where": "v6e", "head": None, "hidden_size": 4096, "vocab_size": 151_936, "layout": "DV", "tokens": 8192}
    figures = {"temp_bytes": 10**8, "expected_ms": 50.0, "kernels": list(kernels)} | plan
    return {
        "implementation": implementation,
        "case": about | {"dtype": "bfloat16", "solve": None, "variant": shown | (variant or {})},
        "plan": figures,
        "versions": {"jax": "0"},
        "commit": "c" * 40,
        "date": "2026-01-01",
    }


def kernel(schedule_ms, least_ms=None, most_ms=None, dma_ms: float | None = 1.0):
    least, most = least_ms or schedule_ms, most_ms or schedule_ms
    return {
        "name": "logitless_forward.1",
        "schedule_ms": schedule_ms,
        "least_ms": least,
        "most_ms": most,
        "dma_ms": dma_ms,
        "mxu_use": 0.9,
    }


def cells(records):
    return [line.strip("| ").split(" | ") for line in kernels_markdown(records).splitlines() if line.startswith("|")][
        2:
    ]


def test_a_row_has_the_floor_of_its_products_and_the_baseline_beside_it():
    plain = record("plain_jnp", temp_bytes=7_470_000_000, expected_ms=66.5)
    ours = record(kernels=[kernel(11.5, 11.0, 12.0), kernel(35.5)])
    (row,) = cells([plain, ours])
    # 4 products of 2 N D V at 920e12 a second.
    assert row[7] == f"{4 * 2 * 8192 * 4096 * 151_936 / 9.2e14 * 1e3:.3g} ms" == "44.3 ms"
    assert row[3] == "47 ms (46.5 ms to 47.5 ms)" and row[8] == "1.06x" and row[9] == "66.5 ms, 7.47 GB"
    assert has_kernels([plain, ours]) and not has_kernels([plain])


@pytest.mark.parametrize(
    ("variant", "floor"),
    [
        ({"differentiate": ["hidden"]}, 2 * 11.08),
        ({"masked": 0.5}, 2 * 11.08),
        ({"flat": 0.5}, 2.5 * 11.08),
        ({"level": "logits"}, 3 * 8192 * 151_936 * 2 / 1.64e12 * 1e3),
    ],
    ids=["frozen", "half masked", "half flat", "logits"],
)
def test_the_floor_of_each_variant(variant, floor):
    (row,) = cells([record(kernels=[kernel(20.0)], variant=variant)])
    assert float(row[7].removesuffix(" ms")) == pytest.approx(floor, rel=2e-3)


def test_of_the_sweep_only_its_two_products_count_as_use_of_the_matrix_units():
    frozen = {"differentiate": ("hidden",)}
    (row,) = cells([record(kernels=[kernel(24.3) | {"name": "logitless_sweep.1"}], variant=frozen)])
    assert row[5] == f"{2 * 11.083 / 24.3:.3f}" and row[8] == "1.10x"


def test_copies_that_nobody_can_count_are_unknown():
    (row,) = cells([record(kernels=[kernel(1.0, dma_ms=None), kernel(1.0)])])
    assert row[4] == "unknown"


def test_what_a_variant_leaves_out_is_left_out_of_the_kernels_that_skip_it():
    assert PlanVariant().axis_shares == {}
    assert PlanVariant(masked=0.5).axis_shares == {"_backward": 0.5, "_d_hidden": 0.5, "logitless": 0.5}
    # The forward pass meets tokens without a cotangent all the same.
    assert PlanVariant(flat=0.5).axis_shares == {"_backward": 0.5, "_d_hidden": 0.5}
    with pytest.raises(BenchError, match="masked must be at least 0 and below 1"):
        PlanVariant(masked=1.0)
    with pytest.raises(BenchError, match="flat must be at least 0 and below 1"):
        PlanVariant(flat=-0.1)


@pytest.mark.parametrize("implementation", ["plain_jnp", "reference", "chunked"])
@pytest.mark.parametrize("loss", ["grpo", "cross_entropy"])
def test_from_logits_the_gradient_takes_the_place_of_the_logits(implementation, loss):
    found = case(level="logits")
    config = PlanConfig("toy", ("v6e",), hidden_size=16, vocab_size=300, loss=loss, variants=(found.variant,))
    (found,) = cases_of(config)
    fn, args = program(found, implementation, 2, 8)
    (value, (d_logits,)), donate = jax.eval_shape(fn, *args), donated(found)
    assert donate == (0,) and args[0].shape == (2, 8, 300) and value.shape == ()
    assert (d_logits.shape, d_logits.dtype) == (args[0].shape, args[0].dtype)
    assert donated(case()) == ()


def test_a_frozen_head_has_no_gradient():
    fn, args = program(case(differentiate=("hidden",)), "chunked", 2, 8)
    _, gradients = jax.eval_shape(fn, *args)
    assert [x.shape for x in gradients] == [(2, 8, 16)]


def test_no_more_steps_meet_a_target_than_there_are_blocks_of_both():
    rng = np.random.default_rng(0)
    for tokens, columns in itertools.product((1, 3, 8), (1, 5, 75)):
        targets = np.sort(rng.integers(0, columns * 16, tokens * 16)).reshape(tokens, 16)
        meets = [
            (row.min() < 16 * (j + 1)) & (row.max() >= 16 * j) for row, j in itertools.product(targets, range(columns))
        ]
        share = share_with_targets("logitless_forward.1", (1, tokens, columns))
        assert share is not None and sum(meets) <= share * tokens * columns + 1e-9
    assert share_with_targets("logitless_backward.1", (1, 75, 16)) is None
    assert share_with_targets("logitless_logits_forward.1", (32, 75)) is None


def test_an_unknown_variant_key_is_one_line(tmp_path, capsys):
    config = tmp_path / "plan.yaml"
    config.write_text("name: x\ntopologies: [v6e]\nheads: [qwen2.5-0.5b]\nvariants: [{masks: 0.5}]\n")
    assert cli.main(["plan", str(config)]) == 2
    assert "masks" in capsys.readouterr().err


def test_sorted_tokens_stand_in_order_and_return_to_their_own_places():
    from logitless.ops.blocks import sort_tokens

    targets = jnp.array([7, 3, 9, 3, 1], jnp.int32)
    kept = jnp.array([True, False, True, True, True])
    cut = sort_tokens(targets, kept, size=2, even=2)
    assert cut.gather(targets, 100).tolist() == [1, 3, 7, 9, 100, 100, 100, 100] and int(cut.blocks) == 2
    assert cut.scatter(cut.gather(targets, 100)).tolist() == [7, 0, 9, 3, 1]
    whole = sort_tokens(targets, None, size=2)
    assert whole.blocks == 3 and whole.scatter(whole.gather(targets, 100)).tolist() == targets.tolist()
