"""The cases of `logitless gradcheck`: peaked inputs, frozen heads, floors, and the TPU kernels in the interpreter."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless.bench.errors import BenchError
from logitless.bench.gradcheck_cases import GradcheckCase, GradcheckConfig, resolve, run_gradcheck
from logitless.bench.gradcheck_inputs import InputFacts, facts_of, make_arrays, reorder
from logitless.cli import read_config
from logitless.ops import pallas_tpu_kernels

CONFIG = Path(__file__).parents[1] / "configs" / "gradcheck_qwen25_1p5b_tpu_interpret.yaml"
PEAKED = GradcheckCase(
    "peaked",
    hidden_size=32,
    vocab_size=301,
    tokens=64,
    implementation="chunked",
    peak_logits=(18.0, 36.0),
    advantages=(8.0, 12.0),
    peaked=True,
)


def config_of(*cases, tmp_path, **changes) -> GradcheckConfig:
    return GradcheckConfig(list(cases), results_dir=str(tmp_path / "results"), **changes)


def records_of(tmp_path):
    return [json.loads(line) for line in (tmp_path / "results" / "gradcheck.jsonl").read_text().splitlines()]


def shrunk(case: GradcheckCase) -> GradcheckCase:
    """The same case at a size for tests."""
    blocks = {"block_n": 32, "block_v": 256}
    return dataclasses.replace(case, head=None, hidden_size=32, vocab_size=640, block_sizes=blocks)


def test_the_full_size_config_asks_what_it_must():
    config = read_config("gradcheck", [str(CONFIG)])
    for case in config.cases:
        resolved = resolve(case)
        assert (resolved.hidden_size, resolved.vocab_size) == (1536, 151_936) and case.tokens >= 64
        assert case.implementation == "pallas_tpu_interpret" and case.peaked and case.factor == 2.0
        # Nothing but the factor is allowed.
        assert {key for key, floor in case.floors.items() if floor == 0.0} == {
            "abs_diff_loss",
            "fwd/logp_max_abs",
            *(f"d{name}_max_abs" for name in case.moving),
        }
    kinds = {(case.level, case.layout, case.frozen_head) for case in config.cases}
    assert {("hidden", "VD", False), ("hidden", "DV", False), ("logits", "VD", False)} < kinds
    assert any(frozen for _, _, frozen in kinds)
    (figures,) = config.beside.values()
    assert figures == {"abs_diff_loss": 2.4e-7, "fwd/logp_max_abs": 1.9e-6, "dlogits_max_abs": 1.5e-8}


@pytest.mark.slow
def test_the_config_passes_at_a_small_size_and_shows_what_it_must(tmp_path, capsys):
    config = read_config("gradcheck", [str(CONFIG)])
    # At small sizes an error is a few roundings, of which one more may be twice as many.
    cases = [dataclasses.replace(shrunk(case), floors={}) for case in config.cases]
    assert run_gradcheck(dataclasses.replace(config, cases=cases, results_dir=str(tmp_path / "results"))) == 0
    out = capsys.readouterr().out
    assert out.count("inputs: largest |z| 3") == len(cases) and "an earlier kernel" in out and "1.50e-08" in out
    for record in records_of(tmp_path):
        assert record["inputs/largest_logit"] >= 30 and record["inputs/sure_tokens"] > 0
        assert record["inputs/least_cotangent"] >= 0.1
        assert record["frozen_head"] is not ("dlm_head_max_abs" in record or record["level"] == "logits")


@pytest.mark.slow
def test_a_wrong_sign_in_the_kernels_exits_1_and_names_the_worst_element(tmp_path, capsys, monkeypatch):
    honest = pallas_tpu_kernels.d_logits
    monkeypatch.setattr(pallas_tpu_kernels, "d_logits", lambda *args, **options: -honest(*args, **options))
    case = shrunk(read_config("gradcheck", [str(CONFIG)]).cases[0])
    # Not from a program that another test has compiled, and not for one to come.
    jax.clear_caches()
    assert run_gradcheck(config_of(case, tmp_path=tmp_path)) == 1
    jax.clear_caches()
    errors = capsys.readouterr().err
    assert "d_hidden: error" in errors and "d_lm_head: error" in errors and "worst element [" in errors


@pytest.mark.parametrize(("level", "layout"), [("hidden", "DV"), ("hidden", "VD"), ("logits", "DV")])
def test_another_order_of_the_sums_is_the_same_problem(level, layout):
    resolved = resolve(GradcheckCase("x", hidden_size=24, vocab_size=150, level=level, layout=layout))
    arrays = make_arrays(resolved, 0)
    turned = list(reorder(resolved, arrays, 3))
    assert len(turned) == 2
    with jax.enable_x64(True):
        wide = [
            {k: x.astype(jnp.float64) if x.dtype == jnp.float32 else x for k, x in some.items()}
            for some in (arrays, *turned)
        ]
        losses, logprobs = zip(*(resolved.loss("reference", **some) for some in wide), strict=True)
        np.testing.assert_allclose(losses, losses[0], rtol=1e-13)
        np.testing.assert_allclose(logprobs, [logprobs[0]] * 3, rtol=1e-12)
    moved = "logits" if level == "logits" else "hidden"
    assert all(not np.array_equal(some[moved], arrays[moved]) for some in turned)


@pytest.mark.parametrize("level", ["hidden", "logits"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "logit_scale": 2.0}, {"softcap": 50.0}], ids=str)
def test_the_facts_are_those_of_the_inputs(level, options):
    resolved = resolve(dataclasses.replace(PEAKED, level=level, **options))
    arrays = make_arrays(resolved, seed=0)
    facts = facts_of(resolved, arrays)
    mask = np.asarray(arrays["mask"])
    assert facts.counted == mask.sum() and 0 < facts.sure_tokens < facts.moving_tokens < facts.counted
    if not options.get("softcap"):
        assert facts.largest_logit == pytest.approx(36.0 if mask[0, -2] else 35.4, abs=0.6)
    ratio = np.exp(np.asarray(resolved.call(arrays, "reference")) - np.asarray(arrays["old_logprobs"]))
    size = (np.abs(np.asarray(arrays["advantages"])) * ratio)[mask] / facts.counted
    assert size.min() * 0.99 <= facts.least_cotangent <= facts.largest_cotangent <= size.max() * 1.01
    assert facts.why_not_peaked() is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peak_logits": (18.0, 29.0)}, "the largest |z| is 29 and must be 30 or more: raise peak_logits"),
        ({"advantages": (0.2, 2.0)}, "and must be 0.1 or more: raise advantages, or give fewer tokens"),
        ({"softcap": 5.0}, "no token has p > 0.99: raise peak_logits"),
    ],
)
def test_inputs_that_are_not_peaked_are_refused_and_nothing_is_written(change, words, tmp_path):
    case = dataclasses.replace(PEAKED, **change)
    with pytest.raises(BenchError) as raised:
        run_gradcheck(config_of(case, tmp_path=tmp_path))
    assert "case 'peaked', seed 0: its inputs are not peaked: " in str(raised.value) and words in str(raised.value)
    assert not (tmp_path / "results" / "gradcheck.jsonl").exists()


def test_inputs_without_any_gradient_are_not_peaked():
    assert "smallest cotangent is 0" in str(InputFacts(5, 31.0, 1, 0, 0.0, 0.0).why_not_peaked())


def test_a_frozen_head_has_no_gradient_and_floors_and_figures_are_those_of_the_config(tmp_path, capsys):
    case = dataclasses.replace(PEAKED, frozen_head=True, bias=True, floors={"dhidden_max_abs": 1.0})
    beside = {"another": {"fwd/logp_max_abs": 0.125}}
    assert run_gradcheck(config_of(case, tmp_path=tmp_path, beside=beside)) == 0
    (record,) = records_of(tmp_path)
    assert not any(key.startswith(("dlm_head", "dbias")) for key in record)
    assert record["budget/dhidden_max_abs/allowed"] >= 1.0
    out = capsys.readouterr().out
    assert "another" in out and "1.25e-01" in out and "dlm_head" not in out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"floors": {"dhidden": 1.0}}, "floors has 'dhidden', which is no quantity here; known: abs_diff_loss"),
        ({"frozen_head": True, "gates": {"dlm_head_max_abs": 1.0}}, "gates has 'dlm_head_max_abs'"),
        ({"frozen_head": True, "level": "logits"}, "frozen_head needs a head"),
        ({"peak_logits": (30.0, 20.0)}, r"peak_logits is \(30.0, 20.0\); give the least"),
        ({"advantages": (0.0, 2.0)}, r"advantages is \(0.0, 2.0\); give the least"),
        # It fits the forward kernel, and not the backward one.
        (
            {
                "hidden_size": 1536,
                "vocab_size": 151_936,
                "implementation": "pallas_tpu_interpret",
                "block_sizes": {"block_n": 32, "block_v": 8192},
            },
            "case 'peaked': pallas_tpu: the kernel 'backward' .* MiB of VMEM",
        ),
    ],
)
def test_a_case_that_cannot_be_says_why(change, words):
    with pytest.raises(BenchError, match=words):
        resolve(dataclasses.replace(PEAKED, **change))


def test_figures_of_what_is_not_measured_are_refused(tmp_path):
    with pytest.raises(BenchError, match="beside has 'dhiden'"):
        run_gradcheck(config_of(PEAKED, tmp_path=tmp_path, beside={"another": {"dhiden": 1.0}}))
