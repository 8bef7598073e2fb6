"""Peers as arms: each judged by the one rule, the wrong ones refused, those that cannot run left out with a line."""

import dataclasses
import importlib.util
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from logitless.bench import peers, run
from logitless.bench.arms import OwnProgram, framework_of, program_of, why_left_out
from logitless.bench.cases import ArmConfig, BenchConfig, Case
from logitless.bench.errors import BenchError
from logitless.bench.hidden_states import write_npz
from logitless.bench.inputs import as_arrays, load_arrays, random_arrays
from logitless.bench.measure import check
from logitless.bench.oracle import plain_loss
from logitless.bench.peers import PEERS
from logitless.bench.records import read_records
from logitless.bench.run import run_bench

HERE = str(Path(__file__).parent)
CASE = Case("random", 24, "float32", "VD", 0.0, 0)


@pytest.fixture(autouse=True)
def arms_importable(monkeypatch, tmp_path):
    """The planted arms, here and in the children, and a folder for what a bench writes."""
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.chdir(tmp_path)


def inputs_of(folder: Path, vocab_size: int) -> Path:
    arrays = random_arrays(tokens=24, sequences=4, hidden_size=16, vocab_size=vocab_size, seed=0, noise=0.25)
    write_npz(folder / "inputs.npz", arrays)
    return folder / "inputs.npz"


@pytest.fixture
def inputs(tmp_path):
    return inputs_of(tmp_path, 301)


def planted(name: str, **changes) -> ArmConfig:
    return ArmConfig(f"planted_arms:{name}", name=name, framework="host", **changes)


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "DV", "masked_fraction": 0.5},
        {"dtype": "bfloat16", "differentiate": ("hidden",)},
        {"loss": "cross_entropy", "masked_fraction": 0.25},
    ],
    ids=str,
)
def test_a_right_program_outside_jax_passes_the_gate(inputs, change):
    case = dataclasses.replace(CASE, **change)
    name = "numpy_grpo" if case.loss == "grpo" else "numpy_cross_entropy"
    answer = check(case, planted(name, losses=(case.loss,)), inputs)
    assert answer["refused"] is None
    assert answer["gates"]["holds_logits"] is None and answer["gates"]["gradcheck"]["ok"] is True
    # What nobody computed is not recorded as checked.
    assert not [key for key in answer["gates"]["gradcheck"] if "logp" in key]
    assert ("dlm_head_max_abs" in answer["gates"]["gradcheck"]) == ("lm_head" in case.differentiate)
    assert answer["shape"]["no_gradient"] == case.masked_fraction


@pytest.mark.parametrize(
    ("name", "loss", "words"),
    [
        ("numpy_wrong_sign", "grpo", "gradcheck: d_lm_head: error"),
        ("numpy_wrong_loss", "cross_entropy", "gradcheck: loss: error"),
        ("numpy_no_head_gradient", "grpo", "d_lm_head: the candidate gave nothing where float32[301, 16] is due"),
    ],
)
def test_a_wrong_program_outside_jax_is_refused(inputs, name, loss, words):
    answer = check(dataclasses.replace(CASE, loss=loss), planted(name, losses=(loss,)), inputs)
    assert words in answer["refused"]


@pytest.mark.slow
def test_a_run_gives_numbers_to_the_right_program_and_none_to_the_wrong_one(capsys):
    config = BenchConfig(
        name="host",
        arms=(ArmConfig("reference"), planted("numpy_grpo"), planted("numpy_wrong_sign")),
        tokens=(24,),
        losses=("grpo", "cross_entropy"),
        hidden_size=16,
        vocab_size=301,
        sequences=4,
        repetitions=2,
        plot=False,
    )
    assert run_bench(config) == 1
    reference, right, wrong, cross_entropy = read_records(Path("results/host.jsonl"))
    assert right["status"] == "ok" and right["arm"]["framework"] == "host"
    numbers = right["numbers"]
    assert len(numbers["times_ms"]) == 2 and numbers["time_ratio"] > 0 and numbers["peak_ratio"] > 0
    assert numbers["temp_bytes"] is None and numbers["temp_ratio"] is None and numbers["peak_bytes"] > 0
    assert numbers["loss"] == pytest.approx(reference["numbers"]["loss"], rel=1e-5)
    assert wrong["status"] == "refused" and wrong["numbers"] is None
    assert cross_entropy["case"]["loss"] == "cross_entropy" and cross_entropy["arm"]["name"] == "reference"
    captured = capsys.readouterr()
    assert "numpy_grpo is left out: its losses are grpo" in captured.err
    assert "refused: gradcheck" in captured.out and "not audited" in captured.out


RIGHT_VOCABULARY = {"tokamax_chunked_xla": 2048}
"""Where a peer is right at some sizes only."""

INSTALLED = [
    pytest.param(
        name,
        loss,
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(
                why_left_out(ArmConfig(name), dataclasses.replace(CASE, loss=loss)) is not None,
                reason=str(why_left_out(ArmConfig(name), dataclasses.replace(CASE, loss=loss))),
            ),
        ],
    )
    for name, peer in PEERS.items()
    for loss in peer.functions
]


@pytest.mark.parametrize(("name", "loss"), INSTALLED)
@pytest.mark.filterwarnings("ignore")  # theirs, of all kinds
def test_an_installed_peer_passes_the_gate(tmp_path, name, loss):
    inputs = inputs_of(tmp_path, RIGHT_VOCABULARY.get(name, 301))
    for change in ({}, {"layout": "DV", "masked_fraction": 0.25}):
        answer = check(dataclasses.replace(CASE, loss=loss, **change), ArmConfig(name), inputs)
        assert answer["refused"] is None, answer["refused"]
        assert answer["environment"]["peer"].keys() == set(PEERS[name].distributions)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs, of all kinds
def test_tokamax_in_chunks_is_refused_where_its_blocks_do_not_divide_the_vocabulary(inputs):
    pytest.importorskip("tokamax", reason="pip install tokamax==0.0.17, with Python 3.12")
    # It pads the head with columns of zeros and counts their logits of 0 in the softmax.
    answer = check(dataclasses.replace(CASE, loss="cross_entropy"), ArmConfig("tokamax_chunked_xla"), inputs)
    assert "gradcheck: loss: error" in answer["refused"]


@pytest.mark.slow
def test_a_wrong_peer_in_torch_is_refused(inputs, monkeypatch):
    pytest.importorskip("torch", reason="pip install torch==2.13.0")
    right = PEERS["torch"]

    def doubled_head_gradient(batch):
        weight = batch.weight
        return right.functions["grpo"](dataclasses.replace(batch, weight=2 * weight - weight.detach()))

    wrong = dataclasses.replace(right, functions={"grpo": doubled_head_gradient})
    monkeypatch.setitem(PEERS, "torch", wrong)
    assert "gradcheck: d_lm_head: error" in check(CASE, ArmConfig("torch"), inputs)["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("change", [{}, {"layout": "DV"}, {"differentiate": ("hidden",)}], ids=str)
def test_torch_gives_its_arrays_in_the_layout_and_dtype_of_the_case(inputs, change):
    pytest.importorskip("torch", reason="pip install torch==2.13.0")
    case = dataclasses.replace(CASE, dtype="bfloat16", **change)
    arrays = load_arrays(inputs, case)
    program = program_of(ArmConfig("torch"), case, arrays)
    values = program.values(program.run())
    assert values.keys() == {"loss", *(f"d_{name}" for name in case.differentiate)}
    for name in case.differentiate:
        assert values[f"d_{name}"].shape == arrays[name].shape and str(values[f"d_{name}"].dtype) == "bfloat16"
    assert program.step() > 0 and program.device_peak_bytes() is None


def test_rounded_logits_widen_the_budget_in_16_bits_and_never_move_the_oracle(inputs):
    def run(dtype, **options):
        return float(jax.jit(lambda a: plain_loss(**a, layout="VD", **options)[0])(as_arrays(arrays, dtype)))

    arrays = load_arrays(inputs, CASE)
    assert abs(run("bfloat16", rounds_logits=True) - run("bfloat16")) > 1e-4
    assert run("float32", rounds_logits=True) == run("float32")


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["grpo", "cross_entropy"])
def test_torch_in_bfloat16_is_judged_by_plain_jnp_with_logits_of_16_bits(inputs, loss):
    pytest.importorskip("torch", reason="pip install torch==2.13.0")
    answer = check(dataclasses.replace(CASE, dtype="bfloat16", loss=loss), ArmConfig("torch"), inputs)
    assert answer["refused"] is None and answer["gates"]["rounds_logits"] is True


def test_a_program_of_ones_own_gets_numpy_arrays_and_the_softcap_of_the_case(inputs):
    given = {}

    def function(*arrays, **options):
        given.update(options, arrays=arrays)
        return 0.5, {}

    case = dataclasses.replace(CASE, softcap=30.0, dtype="bfloat16", differentiate=("hidden",))
    program = OwnProgram(function, case, load_arrays(inputs, case))
    assert program.values(program.run())["loss"] == np.float32(0.5)
    assert (given["softcap"], given["layout"], given["differentiate"]) == (30.0, "VD", ("hidden",))
    assert str(given["arrays"][0].dtype) == "bfloat16" and len(given["arrays"]) == 6


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("liger", {}, "liger_kernel not installed: pip install torch==2.13.0 liger-kernel==0.8.5"),
        ("tunix", {}, "tunix not installed: pip install google-tunix==0.1.7"),
        ("tokamax_xla", {"loss": "cross_entropy"}, "with Python 3.12"),
    ],
)
def test_a_peer_that_is_not_installed_says_what_to_install(name, change, words, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    assert words in str(why_left_out(ArmConfig(name), dataclasses.replace(CASE, **change)))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("tunix", {"loss": "cross_entropy"}, "it has no loss cross_entropy"),
        ("liger", {"loss": "cross_entropy"}, "it has cross_entropy on CUDA alone"),
        ("liger", {"softcap": 30.0}, "its grpo takes no softcap"),
        ("torch", {"softcap": 30.0}, None),
        ("liger", {"loss": "cross_entropy", "device": "gpu"}, None),
    ],
)
def test_a_peer_is_left_out_where_it_cannot_do_the_case(name, change, words, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: module)
    assert why_left_out(ArmConfig(name), dataclasses.replace(CASE, **change)) == words
    assert framework_of(ArmConfig(name)) == ("jax" if name == "tunix" else "torch")


def test_a_run_without_any_arm_is_an_error_and_writes_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda module: None)
    config = BenchConfig(name="none", arms=(ArmConfig("torch"),), tokens=(24,), hidden_size=16, vocab_size=301)
    with pytest.raises(BenchError, match="no arm of none can run here"):
        run_bench(config)
    assert capsys.readouterr().err.count("torch is left out") == 1
    assert list(tmp_path.iterdir()) == []


def test_block_sizes_are_not_a_peers():
    config = BenchConfig(
        name="x", arms=(ArmConfig("torch", block_sizes={"block_n": 8}),), tokens=(24,), hidden_size=16, vocab_size=301
    )
    with pytest.raises(BenchError, match="torch is a peer"):
        run_bench(config)


def test_a_dtype_of_the_logits_is_not_a_peers():
    arms = (ArmConfig("plain_jnp", logits_dtype="float32"),)
    config = BenchConfig(name="x", arms=arms, tokens=(24,), hidden_size=16, vocab_size=301)
    with pytest.raises(BenchError, match="logits_dtype is for implementations of ours; plain_jnp is a peer"):
        run_bench(config)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_config_for_a_gpu_is_skipped_without_one(platform, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run, "_platform", lambda config: platform)
    config = BenchConfig(name="big", arms=(ArmConfig("reference"),), tokens=(8192,), heads=("qwen3-8b",), device="gpu")
    assert run_bench(config) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("skipped: big needs an NVIDIA GPU of 80 GB and jax[cuda13]") and line.endswith(
        f"here is {platform}"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_config_for_a_gpu_makes_its_inputs_on_the_device_and_runs_one_arm_at_a_time(monkeypatch):
    # Its every step but those of the GPU itself.
    monkeypatch.setattr(run, "_platform", lambda config: "gpu")
    config = BenchConfig(
        name="big",
        arms=(ArmConfig("reference"), ArmConfig("chunked")),
        tokens=(24,),
        hidden_size=16,
        vocab_size=301,
        dtype="bfloat16",
        device="gpu",
        off_policy=0.25,
        repetitions=2,
        plot=False,
    )
    assert run_bench(config) == 0
    for record in read_records(Path("results/big.jsonl")):
        assert record["gates"]["gradcheck"]["oracle_dtype"] == "float32" and record["in_turns"] is False
        assert record["numbers"]["device_peak_bytes"] is None and len(record["numbers"]["times_ms"]) == 2
        assert record["case"]["no_gradient"] == 0.0


@pytest.mark.slow
def test_the_platform_is_asked_in_a_child():
    config = BenchConfig(name="x", arms=(ArmConfig("reference"),), tokens=(8,), hidden_size=4, vocab_size=9)
    assert run._platform(config) == "cpu"
