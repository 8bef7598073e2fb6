"""`logitless gradcheck` over a mesh: what it refuses, garbage in the padding, and eight virtual devices."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from logitless.bench import gradcheck_cases
from logitless.bench.errors import BenchError
from logitless.bench.gradcheck_cases import GradcheckCase, GradcheckConfig, resolve, run_gradcheck
from logitless.bench.gradcheck_sharded import ShardingCase
from logitless.bench.shardings import MeshSharding, start_devices
from logitless.cli import main, read_config

CONFIG = Path(__file__).parents[1] / "configs" / "gradcheck_v6e8_cpu.yaml"
SMALL = GradcheckCase("small", hidden_size=16, vocab_size=101, tokens=16, sequences=8, implementation="chunked")
FSDP: dict[str, Any] = {"axes": {"fsdp": 8}, "tokens": ("fsdp",), "vocab": ("fsdp",), "pad_vocab_to": 104}
# Where one device is a mesh, all but the sums over devices is as it is on many.
ALONE = ShardingCase({"fsdp": 1, "tensor": 1}, tokens=("fsdp",), vocab=("tensor", "fsdp"), pad_vocab_to=104)


def over(sharding: ShardingCase, **changes) -> GradcheckCase:
    return dataclasses.replace(SMALL, sharding=sharding, **changes)


def records_of(folder: Path):
    return [json.loads(line) for line in (folder / "gradcheck.jsonl").read_text().splitlines()]


def test_the_config_asks_what_it_must():
    config = read_config("gradcheck", [str(CONFIG)])
    assert config.devices == 8
    found = set()
    for case in config.cases:
        sharding = case.sharding
        sharding.check(case.name, config.devices)
        assert case.factor == 2.0 and not case.floors and case.mask_fraction > 0 and (case.peaked or case.kl_coef)
        sizes = {key: sharding.parts(axes) for key, axes in sharding.split.items()}
        shared = sharding.parts(tuple(set(sharding.tokens) & set(sharding.vocab)))
        assert sizes["vocab"] == 1 or case.vocab_size % sizes["vocab"]
        mesh = (sizes["tokens"], sizes["vocab"], sharding.head if shared > 1 else None)
        found.add((case.implementation, case.level, *mesh))
    meshes = [(8, 1, None), (1, 8, None), (2, 4, None)]
    meshes += [(tokens, 8, head) for tokens in (8, 4) for head in ("gather_head", "gather_tokens")]
    for name in ("chunked", "pallas_tpu_interpret"):
        assert found >= {(name, "hidden", *mesh) for mesh in meshes} | {(name, "logits", 2, 4, None)}
    assert ("one_pass", "hidden", 8, 1, None) in found and ("reference", "hidden", 1, 8, None) in found
    for name in ("chunked", "one_pass", "pallas_tpu_interpret"):
        kinds = {(case.dtype, case.layout) for case in config.cases if case.implementation == name}
        assert {dtype for dtype, _ in kinds} == {"float32", "bfloat16"} and {at for _, at in kinds} == {"DV", "VD"}
    assert any(case.bias and case.softcap for case in config.cases)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"axes": {"fsdp": 4}}, r"axes \{fsdp: 4\} make 4 devices, and the run has 8; change axes, or the number"),
        ({"axes": {}}, r"axes is \{\}; name at least one axis"),
        ({"axes": {"fsdp": 8, "tensor": 0}}, r"axes is \{fsdp: 8, tensor: 0\}; name at least one axis, with at least"),
        ({"tokens": ("data",)}, r"tokens names the axis 'data', which axes \{fsdp: 8\} lack"),
        ({"positions": ("sequence",)}, "positions names the axis 'sequence'"),
        ({"vocab": ("tensor",)}, "vocab names the axis 'tensor'"),
        ({"vocab": ("fsdp", "fsdp")}, r"vocab is \[fsdp, fsdp\]; name an axis once"),
        ({"positions": ("fsdp",)}, "tokens and positions both name fsdp"),
        ({"axes": {"fsdp": 16}}, "tokens splits 8 sequences over 16 devices; give a multiple of 16"),
        ({"tokens": (), "positions": ("fsdp",)}, "positions splits 2 tokens in each sequence over 8 devices"),
        ({"pad_vocab_to": None}, "V = 101 does not divide over 8 devices; give pad_vocab_to: 104"),
        ({"pad_vocab_to": 106}, "pad_vocab_to = 106 does not divide over 8 devices; give pad_vocab_to: 104"),
        ({"pad_vocab_to": 101}, "pad_vocab_to is 101, and V is 101; it must be above V"),
    ],
)
def test_a_sharding_that_cannot_be_says_why(change, words):
    sharding = ShardingCase(**FSDP | change)
    devices = max(8, sharding.size)
    with pytest.raises(BenchError, match=f"case 'small': sharding: {words}"):
        resolve(over(sharding), devices)


def test_what_the_door_refuses_is_refused_before_any_work():
    with pytest.raises(BenchError, match="case 'small': .* 'one_pass' cannot run"):
        resolve(over(ALONE, implementation="one_pass"))
    with pytest.raises(BenchError, match="case 'small': .*one array of logits can lie over an axis once"):
        resolve(over(ALONE, level="logits"))


def test_devices_that_jax_has_not_are_refused(monkeypatch, tmp_path):
    # The flags that it sets are of this process, whose JAX has started.
    for name in ("XLA_FLAGS", "PJRT_NPROC"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    count = len(jax.devices()) + 1
    with pytest.raises(BenchError, match=f"needs {count} devices, and JAX has started with .*process of its own"):
        start_devices(count)
    with pytest.raises(BenchError, match="devices is 0; it must be at least 1"):
        run_gradcheck(GradcheckConfig([SMALL], devices=0, results_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{axes: {fsdp: 8}, token: [fsdp]}", "Option 'token' is not accepted"),
        ("{tokens: [fsdp]}", "required: axes"),
        ("{axes: {fsdp: 8}, head: gather}", "'gather_head', 'gather_tokens']. Got value: gather"),
        ("{axes: {fsdp: 8}, tokens: [fsdp]}", "axes {fsdp: 8} make 8 devices, and the run has 1"),
    ],
)
def test_a_bad_section_is_one_line_and_exit_2(section, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(f"cases: [{{name: a, hidden_size: 3, vocab_size: 5, sharding: {section}}}]\n")
    assert main(["gradcheck", "config.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("sharding", "change"),
    [(ALONE, {"bias": True, "layout": "VD"}), (dataclasses.replace(ALONE, vocab=("tensor",)), {"level": "logits"})],
    ids=["hidden", "logits"],
)
def test_garbage_in_the_padding_changes_nothing(sharding, change, tmp_path, capsys):
    config = GradcheckConfig([over(sharding, **change)], results_dir=str(tmp_path))
    assert run_gradcheck(config) == 0, capsys.readouterr().err
    (record,) = records_of(tmp_path)
    assert record["ok"] and record["failures"] == [] and record["shape/vocab"] == 101
    assert record["sharding"].startswith("fsdp 1 x tensor 1: tokens by fsdp; vocab by tensor")
    assert "V padded to 104" in record["sharding"]


def test_a_gradient_of_the_padding_exits_1_and_says_where(tmp_path, capsys, monkeypatch):
    honest = gradcheck_cases.linear_grpo_loss

    def leaks(hidden, lm_head, *args, **options):
        out = honest(hidden, lm_head, *args, **options)
        if options["implementation"] == "reference":
            return out
        padding = 1e-30 * lm_head[3, 101]
        return out._replace(loss=out.loss + padding - jax.lax.stop_gradient(padding))

    monkeypatch.setattr(gradcheck_cases, "linear_grpo_loss", leaks)
    assert run_gradcheck(GradcheckConfig([over(ALONE)], results_dir=str(tmp_path))) == 1
    (record,) = records_of(tmp_path)
    sentence = (
        "d_lm_head: 1 of 48 elements of the padding have a gradient, which must be exactly 0; the first is [3, 101]"
    )
    assert not record["ok"] and record["failures"] == [f"{sentence} with 1e-30"]
    assert f"FAILED small (seed 0): {sentence}" in capsys.readouterr().err


def test_axes_of_a_mesh_in_their_order():
    sharding = MeshSharding({"data": 2, "tensor": 4}, tokens=("data",), vocab=("tensor",))
    sharding.check("x", 8)
    devices = [jax.devices()[0]] * 9
    mesh = sharding.mesh(devices)
    assert mesh.axis_names == ("data", "tensor") and mesh.devices.shape == (2, 4)
    head = sharding.head_sharding(mesh, 7)
    assert (head.token_axes, head.vocab_axes, head.vocab_size) == (("data",), ("tensor",), 7)


EIGHT = """\
devices: 8
cases:
  - &case
    name: fsdp 8, head
    hidden_size: 16
    vocab_size: 101
    tokens: 32
    sequences: 8
    implementation: chunked
    bias: true
    sharding: {axes: {fsdp: 8}, tokens: [fsdp], vocab: [fsdp], head: gather_head, pad_vocab_to: 104}
  - <<: *case
    name: data 2 x sequence 2 x tensor 2
    sharding:
      axes: {data: 2, sequence: 2, tensor: 2}
      tokens: [data]
      positions: [sequence]
      vocab: [tensor]
      pad_vocab_to: 102
"""

# Without a thread to spare, the simulation of eight devices on few cores stands still.
KERNELS = """\
  - <<: *case
    name: tensor 8, kernels
    implementation: pallas_tpu_interpret
    sharding: {axes: {tensor: 8}, vocab: [tensor], pad_vocab_to: 104}
"""


def run(code: str, folder: Path, config: str) -> subprocess.CompletedProcess:
    (folder / "config.yaml").write_text(config)
    command = [sys.executable, "-c", code, "gradcheck", str(folder / "config.yaml"), f"--results_dir={folder}"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)


@pytest.mark.slow
def test_eight_devices_inside_the_budget_exit_0(tmp_path):
    done = run("import sys; from logitless.cli import main; sys.exit(main())", tmp_path, EIGHT + KERNELS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [record["ok"] for record in records_of(tmp_path)] == [True] * 3


WRONG = """
import sys
from logitless.cli import main
from logitless.ops import sharded_device
sharded_device._sum_over = lambda x, axes: x
sys.exit(main())
"""


@pytest.mark.slow
def test_a_sum_over_devices_that_is_left_out_exits_1(tmp_path):
    done = run(WRONG, tmp_path, EIGHT)
    assert done.returncode == 1, done.stderr[-3000:]
    # FSDP over all devices scatters, and sums nothing beside.
    assert [record["ok"] for record in records_of(tmp_path)] == [True, False]
    assert "FAILED data 2 x sequence 2 x tensor 2 (seed 0): d_hidden: error" in done.stderr
    assert "d_lm_head: error" in done.stderr and "d_bias: error" in done.stderr
