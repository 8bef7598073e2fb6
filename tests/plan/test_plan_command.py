"""`logitless plan`: its config, its table, its sentences, its exit code."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from logitless.bench import plan_run
from logitless.bench.plan_cases import PLAIN, PlanConfig, cases_of, program
from logitless.bench.report import with_tables
from logitless.cli import main
from logitless.plan import CHIPS, ProgramPlan

HEAD = "name: small\nhidden_size: 64\nvocab_size: 1000\ntokens: [256]\n"


def write(folder, text):
    path = folder / "plan.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("topologies: [v6]\n" + HEAD, "topology='v6' is unknown; known: v4, v5e, v5p, v6e, 7x, h100, a100, b200"),
        (
            "topologies: [v6e]\nimplementations: [chunkd]\n" + HEAD,
            "implementation 'chunkd' is unknown; known: plain_jnp",
        ),
        ("topologies: []\n" + HEAD, "topologies is empty"),
        ("topologies: [v6e]\nname: x\nhidden_size: 0\nvocab_size: 10\n", "hidden_size is 0; it must be above 0"),
        ("topologies: [v6e]\nname: x\nhidden_size: 8\nvocab_size: 0\n", "vocab_size is 0; it must be above 0"),
        ("topologies: [v6e]\nname: x\n", "give heads, or hidden_size and vocab_size"),
        ("topologies: [v6e]\nname: x\nhidden_size: 8\n", "give heads, or hidden_size and vocab_size"),
        ("topologies: [v6e]\nheads: [qwen3-8b]\n" + HEAD, "give heads, or hidden_size and vocab_size, not both"),
        ("topologies: [v6e]\nsolve: tokens\nmost: 512\n" + HEAD, "most is 512 and step 1024"),
        ("topologies: [v6e]\nname: x\nheads: [qwen9-8b]\n", "no model named 'qwen9-8b'"),
        ("topologies: [v6e]\nsequences: 7\n" + HEAD, "256 tokens do not divide into 7 sequences"),
        ("topologies: [v6e]\nreserve_gb: -1\n" + HEAD, "reserve_gb is -1"),
        ("topologies: [v6e]\nsolve: tokns\n" + HEAD, "tokns"),
        ("topologies: [v6e]\nname: a/b\nhidden_size: 8\nvocab_size: 9\n", "name is 'a/b'"),
    ],
)
def test_a_config_without_meaning_is_refused_in_a_line(tmp_path, capsys, text, says):
    assert main(["plan", write(tmp_path, text), "--results", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.fixture
def planned(monkeypatch):
    """Plans as a compiler of 1 GB of HBM would give them: temporaries of 1 kB a token, of a tenth for chunked."""
    asked = []

    def plan_function(fn, args, where, *, reserve_bytes=0, **options):
        tokens = args[2].size
        asked.append((where, tokens, options))
        temp = tokens * (100 if fn == "chunked" else 1000)
        total = temp + 10**6
        fits = total + reserve_bytes <= 10**9
        plan = ProgramPlan(where, fits, None if fits else "out of HBM", 10**9, reserve_bytes, temp, 10**6, 0, 0, total)
        return plan

    real = program

    def marked(case, implementation, sequences, positions):
        return implementation, real(case, implementation, sequences, positions)[1]

    monkeypatch.setattr(plan_run, "plan_function", plan_function)
    monkeypatch.setattr(plan_run, "program", marked)
    monkeypatch.setattr(plan_run, "versions", lambda platform, python: {"libtpu": "0.0"})
    monkeypatch.setattr("logitless.plan.planner.plan_function", plan_function)
    return asked


def test_a_plan_prints_its_table_and_appends_its_record(tmp_path, capsys, planned):
    text = "topologies: [v6e, v5e]\nimplementations: [plain_jnp, chunked]\n" + HEAD
    for runs in (1, 2):
        assert main(["plan", write(tmp_path, text), "--results", str(tmp_path), "--plot", "true"]) == 0
        lines = (tmp_path / "small.jsonl").read_text().splitlines()
        assert len(lines) == 4 * runs
    out = capsys.readouterr().out
    assert "compiler estimate, not a measurement" in out and "0.10x" in out
    record = json.loads(lines[-1])
    assert record["case"]["where"] == "v5e" and record["implementation"] == "chunked"
    assert record["plan"]["temp_bytes"] == 25_600 and record["versions"] == {"libtpu": "0.0"}
    assert {where for where, _, _ in planned} == {"v6e", "v5e"}
    assert (tmp_path / "small.png").read_bytes().startswith(b"\x89PNG")
    page = with_tables("<!-- plan:small -->\nold\n<!-- /plan:small -->\n", tmp_path)
    assert "| v6e |" in page and "old" not in page and "not a measurement" in page


@pytest.mark.parametrize(
    ("solve", "plain", "chunked"), [("tokens", 487 * 1024, 4873 * 1024), ("batch", 499 * 999, None)]
)
def test_the_most_tokens_that_fit_beside_the_reserve(tmp_path, capsys, planned, solve, plain, chunked):
    sizes = "step: 1024\nmost: 8388608\n" if solve == "tokens" else "tokens: [999]\nmost: 499500\n"
    text = f"name: s\nhidden_size: 64\nvocab_size: 1000\ntopologies: [v6e]\nsolve: {solve}\nreserve_gb: 0.5\n{sizes}"
    implementations = "[plain_jnp, chunked]" if chunked else "[plain_jnp]"
    config = write(tmp_path, text + f"implementations: {implementations}\n")
    assert main(["plan", config, "--results", str(tmp_path)]) == 0
    found = [json.loads(line)["case"]["tokens"] for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    # 10^9 - 0.5 10^9 - 10^6 bytes, over 1,000 or 100 a token, in whole steps or sequences.
    assert found == [n for n in (plain, chunked) if n is not None]
    out = capsys.readouterr().out
    if chunked:
        assert f"chunked on v6e: {chunked:,} tokens a device fit" in out and "10.01x those of plain_jnp" in out


def test_a_program_that_the_compiler_refuses_is_a_row_and_exit_1(tmp_path, capsys, planned, monkeypatch):
    def refuse(fn, args, where, **options):
        return ProgramPlan(where, False, "no such operation", 10**9)

    monkeypatch.setattr(plan_run, "plan_function", refuse)
    config = write(tmp_path, "topologies: [v6e]\nimplementations: [plain_jnp]\n" + HEAD)
    assert main(["plan", config, "--results", str(tmp_path)]) == 1
    assert "no: no such operation" in capsys.readouterr().out


def test_heads_give_layout_softcap_and_scale():
    config = PlanConfig("x", ("v6e",), heads=("gemma-2-2b", "granite-3.1-2b", "qwen2.5-7b"))
    found = [(case.layout, case.softcap, case.logit_scale, case.vocab_size) for case in cases_of(config)]
    assert found == [("VD", 30.0, 1.0, 256_000), ("VD", None, 1 / 8, 49_155), ("DV", None, 1.0, 152_064)]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="the compiler: pip install '.[tpu]'")
def test_the_command_plans_one_chip_and_several_and_prints_nothing_but_its_answer(tmp_path):
    text = f"topologies: [v6e, 'v6e:2x2']\nimplementations: [{PLAIN}, chunked, one_pass]\n" + HEAD.replace(
        "1000", "30000"
    )
    command = [sys.executable, "-m", "logitless", "plan", write(tmp_path, text), "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not done.stderr.strip()
    records = [json.loads(line) for line in (tmp_path / "small.jsonl").read_text().splitlines()]
    assert [r["plan"]["fits"] for r in records] == [True] * 6
    one, four = records[:3], records[3:]
    for single, several in zip(one, four, strict=True):
        assert several["plan"]["argument_bytes"] == pytest.approx(single["plan"]["argument_bytes"], rel=0.02)
        # The gradient of the head, and the loss, are summed over the chips.
        assert several["plan"]["collective_bytes"] >= 64 * 30_000 * 2 > single["plan"]["collective_bytes"] == 0
    assert CHIPS["v6e"].hbm_bytes == one[0]["plan"]["hbm_bytes"]
