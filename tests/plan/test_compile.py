"""`logitless plan compile`: the kernels through the chips' real compilers, and the record that can be resumed."""

import json
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest

from logitless import linear_logprobs
from logitless.bench import compile_matrix
from logitless.bench.compile_matrix import CHIPS, Cells, CompileConfig, cells_of, compile_cell, compile_markdown
from logitless.bench.errors import BenchError
from logitless.bench.records import read_records
from logitless.bench.report import with_tables
from logitless.bench.tune import kernel_program
from logitless.cli import main, read_config
from logitless.ops.pallas_tpu import linear_token_stats_pallas_tpu
from logitless.ops.pallas_tpu_vmem import HeadProblem, vmem_of
from logitless.ops.types import HeadOptions, LogitScalars
from logitless.plan import ProgramPlan, plan_function, topology
from logitless.plan.report import KernelPlan

# Few tokens, so that blocks are small and compile in seconds; full ones are in the record of the matrix.
CONFIG = CompileConfig("matrix", (Cells((64,), (1000,)),), tokens=256)

# Every chip, both layouts, a D that is no multiple of 128 and a V that is none of 16, one and two backward kernels.
DOZEN = [
    ("v4", 896, 32_000, "VD"),
    ("v4", 4096, 49_152, "DV"),
    ("v5e", 1536, 151_936, "DV"),
    ("v5e", 960, 49_155, "VD"),
    ("v5p", 2048, 128_256, "VD"),
    ("v5p", 4096, 32_000, "DV"),
    ("7x", 896, 262_144, "DV"),
    ("7x", 2048, 128_256, "VD"),
    ("v6e", 896, 151_936, "VD"),
    ("v6e", 1536, 50_257, "DV"),
    ("v6e", 4096, 151_936, "DV"),
    ("v6e", 8192, 49_152, "VD"),
]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="the compiler: pip install '.[tpu]'")
@pytest.mark.parametrize("cell", DOZEN, ids=lambda cell: "-".join(map(str, cell)))
def test_the_kernels_compile_within_the_bytes_of_the_model(cell):
    record = compile_cell(CONFIG, cell)
    assert record["verdict"] == "compiled", record["reason"]
    _, d, v, _ = cell
    problem = HeadProblem(CONFIG.tokens, d, v, jnp.dtype(CONFIG.dtype), jnp.dtype(CONFIG.dtype))
    assert sorted(kernel["name"] for kernel in record["kernels"]) == sorted(record["blocks"])
    for kernel in record["kernels"]:
        model = vmem_of(kernel["name"], problem, *record["blocks"][kernel["name"]])
        assert kernel["vmem_bytes"] <= sum(model.values())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="the compiler: pip install '.[tpu]'")
@pytest.mark.parametrize(
    ("chip", "wrt", "dtype", "precision"),
    [
        ("v6e", (0, 1), "bfloat16", None),
        ("v6e", (0,), "bfloat16", "highest"),
        ("v6e", (0, 1), "float32", ("highest", "highest")),
        ("v5p", (0,), "float32", "default"),
    ],
    ids=str,
)
def test_a_loss_whose_tokens_and_cotangents_are_constants_compiles(chip, wrt, dtype, precision):
    """The order of the tokens is a constant as well: the compiler dies where that is scattered."""
    kind = topology(chip).chip.device_kind
    options = HeadOptions("DV", precision=precision, block_n=64, block_v=256, platform="tpu", device_kind=kind)

    def loss(hidden, lm_head):
        targets = jnp.arange(100, dtype=jnp.int32) % 7
        stats = linear_token_stats_pallas_tpu(hidden, lm_head, None, targets, None, LogitScalars(), options)
        return -stats.logprobs.mean()

    args = jax.ShapeDtypeStruct((100, 128), dtype), jax.ShapeDtypeStruct((128, 500), dtype)
    plan = plan_function(jax.grad(loss, wrt), args, chip, timeout_s=300.0)
    assert plan.fits, plan.reason
    assert len(plan.kernels) == len(wrt)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="the compiler: pip install '.[tpu]'")
def test_hidden_states_of_one_number_compile():
    options = HeadOptions("DV", block_n=64, block_v=256, platform="tpu", device_kind="TPU v6 lite")

    def loss(hidden, lm_head, targets):
        return linear_token_stats_pallas_tpu(
            hidden, lm_head, None, targets, None, LogitScalars(), options
        ).logprobs.sum()

    shapes = ((100, 1), "bfloat16"), ((1, 300), "bfloat16"), ((100,), "int32")
    plan = plan_function(jax.grad(loss, (0, 1)), [jax.ShapeDtypeStruct(*x) for x in shapes], "v6e", timeout_s=300.0)
    assert plan.fits, plan.reason


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="the compiler: pip install '.[tpu]'")
@pytest.mark.parametrize("wrt", [(0, 1), 0], ids=["trained", "frozen"])
def test_temporaries_are_the_float32_sums_and_one_copy_of_the_hidden_states(wrt):
    """Of a trained head not so where XLA gives the gathers of rows to the SparseCores, as with jax 0.12: twice as much.

    A frozen head has no such sums, and stays below the bound either way.
    """
    tokens, d, vocab = 8192, 1536, 2048

    def loss(hidden, lm_head, targets, mask, advantages):
        options = {"mask": mask, "layout": "VD", "block_sizes": {"block_n": 256, "block_v": 512}}
        logprobs = linear_logprobs(hidden, lm_head, targets, implementation="pallas_tpu", **options)
        return jnp.sum(jnp.where(mask, logprobs, 0.0) * advantages)

    kinds = ((tokens, d), "bfloat16"), ((vocab, d), "bfloat16"), *(((tokens,), x) for x in ("int32", "bool", "float32"))
    args = [jax.ShapeDtypeStruct(*x) for x in kinds]
    plan = plan_function(jax.value_and_grad(loss, wrt), args, "v6e", timeout_s=300.0, schedules=False)
    assert plan.fits, plan.reason
    # A third more than the two: numbers of each token, lane by lane.
    assert plan.temp_bytes < (4 + 2) * tokens * d * 4 / 3


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="the compiler: pip install '.[tpu]'")
def test_how_many_blocks_each_of_two_cores_has_is_known_to_the_plan():
    options = HeadOptions("VD", block_n=64, block_v=256, platform="tpu", device_kind=topology("v5p").chip.device_kind)
    bf16 = jnp.dtype("bfloat16")
    fn, args = kernel_program("d_hidden", HeadProblem(512, 128, 1000, bf16, bf16), options)
    (kernel,) = plan_function(fn, args, "v5p", timeout_s=300.0).kernels
    assert kernel.grid == (1, 4, 4) and not kernel.unknown


@pytest.fixture
def without_a_compiler(monkeypatch):
    calls = []

    def plan(fn, args, where, **options):
        calls.append(where)
        kernel = KernelPlan("logitless_forward.1", (1, 2, 3), 1.0, 2.0, 1.0, 0.9, 0, 2**20)
        kernels, again = (kernel,), len(calls) > 1
        return ProgramPlan(where, True, None, 2**30, temp_bytes=5, kernels=kernels, expected_ms=2.1, cached=again)

    monkeypatch.setattr(compile_matrix, "plan_function", plan)
    monkeypatch.setattr(compile_matrix, "versions", lambda *_: {"jax": "1", "libtpu": "2"})
    return calls


def test_a_cell_is_recorded_as_it_is_done_and_one_line_stands_for_it(tmp_path, without_a_compiler, capsys):
    group = {"chips": ("v6e",), "vocab_sizes": (1000,), "layouts": ("VD",)}
    cells = (Cells(hidden_sizes=(64,), **group), Cells((8192,), (151_936,), ("v4",), ("DV",)))
    config = CompileConfig("matrix", cells, results=str(tmp_path))
    assert compile_matrix.run_compile(config) == 0
    compiled, refused = read_records(tmp_path / "matrix.jsonl")
    assert compiled["verdict"] == "compiled" and compiled["blocks"]["forward"][1] == 1024
    assert refused["verdict"] == "refused" and "where 15 can be used" in refused["reason"]
    # The second time the answers come from the cache: the seconds that the compiler took stay.
    path = tmp_path / "matrix.jsonl"
    path.write_text(path.read_text().replace(f'"seconds": {compiled["seconds"]}', '"seconds": 77.0'))
    assert compile_matrix.run_compile(config) == 0
    assert [record["seconds"] for record in read_records(path)] == [77.0, 0.0]
    assert "2 cells, 0 failed" in capsys.readouterr().out


def test_a_page_takes_the_table_of_all_cells(tmp_path, without_a_compiler):
    config = CompileConfig("matrix", (Cells((64,), (1000,), ("v6e", "v4")),), results=str(tmp_path))
    compile_matrix.run_compile(config)
    page = with_tables("a\n<!-- compile:matrix -->\nold\n<!-- /compile:matrix -->\nb\n", tmp_path)
    assert "old" not in page and page.startswith("a\n") and page.endswith("b\n")
    assert "| v6e | 64 | 1000 DV VD | 1 | compiled | forward " in page and "4 cells: 4 compiled." in page
    assert "compiler estimate, not a measurement" in page
    assert compile_markdown(read_records(tmp_path / "matrix.jsonl")) in page


def test_the_cells_come_in_the_order_of_the_config_and_once():
    config = CompileConfig("m", (Cells((4,), (8,), ("v6e",), ("DV",)), Cells((4, 5), (8,), ("v6e", "v4"), ("DV",))))
    assert cells_of(config) == [("v6e", 4, 8, "DV"), ("v6e", 5, 8, "DV"), ("v4", 4, 8, "DV"), ("v4", 5, 8, "DV")]


def test_the_shipped_config_has_every_cell_of_the_matrix():
    cells = cells_of(read_config("plan compile", ["configs/compile_matrix.yaml"]))
    assert len(cells) == len(CHIPS) * 5 * 5 * 2
    assert cells[:2] == [("v6e", 1536, 151_936, "VD"), ("v6e", 4096, 151_936, "VD")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{name: m, cells: []}", "no cell"),
        ("{name: m, cells: [{chips: [h100], hidden_sizes: [4], vocab_sizes: [8]}]}", "single TPUs"),
        ("{name: m, cells: [{chips: ['v6e:2x2'], hidden_sizes: [4], vocab_sizes: [8]}]}", "single TPUs"),
        ("{name: m, cels: []}", "cels"),
    ],
)
def test_a_bad_config_is_one_line_and_exit_2(text, message, tmp_path, capsys):
    path = tmp_path / "compile.yaml"
    path.write_text(text)
    assert main(["plan", "compile", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("logitless plan compile: error: ") and message in lines[0]


def test_a_negative_size_is_refused():
    with pytest.raises(BenchError, match="above 0"):
        CompileConfig("m", (Cells((0,), (8,)),))


def test_a_record_is_json(without_a_compiler):
    assert json.loads(json.dumps(compile_cell(CONFIG, ("v6e", 64, 1000, "VD"))))["chip"] == "v6e"
