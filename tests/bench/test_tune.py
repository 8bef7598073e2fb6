"""`logitless bench tune`: what is tried, what wins, and the table that is left; the compiler is stood in for."""

import json

import jax
import pytest

from logitless.bench import tune
from logitless.bench.tune import TuneConfig, kernel_program, run_tune
from logitless.cli import main
from logitless.heads import HEADS
from logitless.ops.pallas_tpu_vmem import HeadProblem
from logitless.ops.types import HeadOptions
from logitless.plan import ProgramPlan
from logitless.plan.report import KernelPlan

BF16 = jax.numpy.dtype("bfloat16")


@pytest.fixture
def planned(monkeypatch):
    """Plans in which more tokens a block take longer; 1,024 do not compile."""
    seen, made, program = [], {}, tune.kernel_program

    def remember(kernel, problem, options):
        fn, args = program(kernel, problem, options)
        made[fn] = options.block_n
        return fn, args

    def plan(fn, args, where, **options):
        seen.append((where, *(x.shape for x in args[:2])))
        if made[fn] == 1024:
            return ProgramPlan(where, False, "out of VMEM", 2**30)
        kernel = KernelPlan("logitless.1", (), 1.0, float(made[fn]), 0.0)
        return ProgramPlan(where, True, None, 2**30, temp_bytes=0, kernels=(kernel,))

    monkeypatch.setattr(tune, "kernel_program", remember)
    monkeypatch.setattr(tune, "plan_function", plan)
    monkeypatch.setattr(tune, "versions", lambda *_: {"jax": "1", "libtpu": "2"})
    return seen


@pytest.mark.parametrize("kernel", ["forward", "sweep"])
def test_the_fastest_that_compiles_becomes_a_row_and_other_rows_stay(kernel, tmp_path, planned):
    out = tmp_path / "table.json"
    other = {"chip": "v5e", "kernel": "forward", "hidden_size": 1, "vocab_size": 2, "dtype": "bfloat16", "block_n": 16}
    out.write_text(json.dumps([other]))
    config = TuneConfig(
        heads=("qwen2.5-1.5b",), kernels=(kernel,), candidates=3, extra=((64, 256), (128, 256)), out=str(out)
    )
    assert run_tune(config) == run_tune(config) == 0
    kept, row = json.loads(out.read_text())
    assert kept == other
    assert (row["block_n"], row["block_v"], row["schedule_ms"], row["by"]) == (64, 256, 64.0, "plan")
    assert (row["hidden_size"], row["vocab_size"], row["versions"]["jax"]) == (1536, 151_936, "1")
    assert set(planned) == {("v6e", (8192, 1536), (151_936, 1536))}


def test_of_sizes_within_a_hundredth_the_smallest_wins(tmp_path, planned):
    """Which compiles minutes sooner: 1 % is worth that, 2 % are not."""
    table, extra = tmp_path / "table.json", ((1616, 768), (1632, 512), (1648, 256))
    config = TuneConfig(heads=("gpt2",), kernels=("forward",), candidates=1, extra=extra, out=str(table))
    assert run_tune(config) == 0
    row = json.loads(table.read_text())[0]
    assert (row["block_n"], row["block_v"], row["schedule_ms"]) == (1632, 512, 1632.0)


def test_where_two_kernels_take_the_place_of_one_there_is_no_row(tmp_path, planned, capsys):
    """Blocks of a v4 that could do a frozen head in one sweep would be slower than two kernels."""
    out = tmp_path / "table.json"
    assert run_tune(TuneConfig(chips=("v4",), heads=("qwen2.5-7b",), kernels=("sweep",), out=str(out))) == 0
    assert not out.exists() and not planned
    assert "v4 sweep D=3584 V=152064: no row; forward and d_hidden do it here" in capsys.readouterr().err


def test_a_row_of_which_nothing_compiles_is_left_out_and_fails(tmp_path, planned):
    config = TuneConfig(heads=("gpt2",), kernels=("forward",), candidates=1, out=str(tmp_path / "table.json"))
    assert run_tune(config) == 1
    assert not (tmp_path / "table.json").exists()


def test_an_extra_size_that_does_not_fit_is_said_to_be_left_out(tmp_path, planned, capsys):
    table, extra = str(tmp_path / "table.json"), ((64, 256), (4096, 65_536))
    assert run_tune(TuneConfig(heads=("gpt2",), kernels=("forward",), candidates=1, extra=extra, out=table)) == 0
    assert "64 x 256: " in (said := capsys.readouterr().err) and "; 4096 x 65536 does not fit" in said


def test_every_size_of_a_head_makes_one_row():
    assert len(tune._heads(TuneConfig())) == len({(x.hidden_size, x.vocab_size) for x in HEADS.values()})


@pytest.mark.parametrize("kernel", ["forward", "backward", "d_lm_head", "d_hidden", "sweep"])
@pytest.mark.parametrize("layout", ["VD", "DV"])
def test_a_kernel_stands_alone_in_its_program(kernel, layout):
    options = HeadOptions(layout, block_n=16, block_v=256, platform="tpu", device_kind="TPU v6 lite")
    fn, args = kernel_program(kernel, HeadProblem(64, 128, 512, BF16, BF16), options)
    text = str(jax.make_jaxpr(fn)(*args))
    assert text.count("pallas_call[") == 1 and f"logitless_{kernel}" in text


def test_times_are_medians_of_runs_in_turns():
    programs = {(16, 256): (lambda h, w, t, x: (h.sum(), w, t), _shapes()), (32, 256): (_sum, _shapes())}
    found = tune._time(programs, 3, 20)
    assert [*found] == [(16, 256), (32, 256)] and all(x["time_ms"] >= 0 for x in found.values())


def _shapes():
    shape = jax.ShapeDtypeStruct
    return (
        shape((4, 8), BF16),
        shape((20, 8), BF16),
        shape((4,), jax.numpy.int32),
        shape((4,), jax.numpy.float32),
    )


def _sum(hidden, lm_head, targets, row):
    return row.sum()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{chips: [h100]}", "single TPUs"),
        ("{heads: [gtp2]}", "nearest known: gpt2"),
        ("{candidates: 0}", "candidates is 0"),
        ("{kernels: [sideways]}", "sideways"),
        ("{out: nowhere/table.json}", "there is no folder nowhere"),
    ],
)
def test_a_bad_config_is_one_line_and_exit_2(text, message, tmp_path, capsys):
    path = tmp_path / "tune.yaml"
    path.write_text(text)
    assert main(["bench", "tune", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("logitless bench tune: error: ") and message in lines[0]
