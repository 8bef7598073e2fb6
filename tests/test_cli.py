import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from logitless.bench import gradcheck_cases
from logitless.cli import JOBS, SECOND_WORDS, main

CASE = (
    "{name: small, hidden_size: 16, vocab_size: 101, tokens: 13, implementation: chunked, block_sizes: {block_v: 32}}"
)


def write(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def test_inside_the_budget_exits_0_and_appends_one_record_a_case(tmp_path, capsys):
    config = write(tmp_path, f"cases: [{CASE}]\nresults_dir: {tmp_path / 'elsewhere'}\n")
    for runs in (1, 2):
        assert main(["gradcheck", config, "--results_dir", str(tmp_path / "out")]) == 0
        records = [json.loads(line) for line in (tmp_path / "out" / "gradcheck.jsonl").read_text().splitlines()]
        assert len(records) == runs
    assert not (tmp_path / "elsewhere").exists()
    assert records[0]["case"] == "small"
    assert records[0]["ok"] is True
    assert records[0]["shape/vocab"] == 101
    assert {"date", "commit", "device", "jax", "seed", "dhidden_max_rel", "blocks/block_v"} < set(records[0])
    assert "dlm_head_max_abs" in capsys.readouterr().out


def test_a_wrong_sign_in_the_backward_pass_exits_1_and_names_the_worst_element(tmp_path, capsys, monkeypatch):
    honest = gradcheck_cases.linear_grpo_loss

    def wrong_sign(*args, implementation, **options):
        out = honest(*args, implementation=implementation, **options)
        if implementation == "reference":
            return out
        return out._replace(loss=2 * jax.lax.stop_gradient(out.loss) - out.loss)

    monkeypatch.setattr(gradcheck_cases, "linear_grpo_loss", wrong_sign)
    assert main(["gradcheck", write(tmp_path, f"cases: [{CASE}]\nresults_dir: {tmp_path}\n")]) == 1
    errors = capsys.readouterr().err
    assert "FAILED small (seed 0): d_lm_head: error" in errors
    assert "worst element [" in errors
    assert json.loads((tmp_path / "gradcheck.jsonl").read_text())["ok"] is False


def test_outside_an_absolute_gate_exits_1(tmp_path, capsys):
    case = CASE.replace("{name", "{gates: {dhidden_max_rel: 1.0e-12}, name")
    assert main(["gradcheck", write(tmp_path, f"cases: [{case}]\nresults_dir: {tmp_path}\n")]) == 1
    assert "above its gate 1e-12" in capsys.readouterr().err


def test_the_inputs_are_peaked_masked_and_of_both_signs():
    case = gradcheck_cases.GradcheckCase("x", hidden_size=64, vocab_size=509, tokens=64, softcap=30.0, temperature=0.7)
    arrays = gradcheck_cases.make_arrays(gradcheck_cases.resolve(case), seed=0)
    logprobs = np.asarray(arrays["old_logprobs"])[np.asarray(arrays["mask"])]
    assert 0.1 < np.mean(logprobs > -0.5) < 0.5
    assert np.mean(logprobs < -10) > 0.05
    assert 0 < np.mean(arrays["mask"]) < 1
    assert np.min(arrays["advantages"]) < 0 < np.max(arrays["advantages"])


BAD_INPUTS = {
    "unknown key": ("casez: 3\n", "Option 'casez' is not accepted"),
    "unknown key of a case": ("cases: [{name: a, tokns: 5}]\n", "Option 'tokns' is not accepted"),
    "wrong type": ("cases: 3\n", "cases: Expected a <class 'list'>"),
    "wrong type in a case": ("cases: [{name: a, tokens: five}]\n", "tokens: Expected a <class 'int'>. Got value: five"),
    "wrong choice": ("cases: [{name: a, dtype: f16}]\n", "Got value: f16"),
    "missing key": ("results_dir: x\n", "the following arguments are required: cases"),
    "no cases": ("cases: []\n", "cases is empty"),
    "malformed YAML": ("cases: [\n", "not valid YAML"),
    "empty file": ("", "it holds nothing"),
    "a list": ("- a\n", "must hold 'key: value' lines"),
    "unknown head": ("cases: [{name: a, head: qwen9}]\n", "no model named 'qwen9'"),
    "no sizes": ("cases: [{name: a}]\n", "give head, or both hidden_size and vocab_size"),
    "two heads": ("cases: [{name: a, head: gpt2, vocab_size: 5}]\n", "not both"),
    "zero vocabulary": ("cases: [{name: a, hidden_size: 3, vocab_size: 0}]\n", "both must be positive"),
    "negative tokens": ("cases: [{name: a, head: gpt2, tokens: -1}]\n", "both must be positive"),
    "indivisible": ("cases: [{name: a, head: gpt2, tokens: 7, sequences: 2}]\n", "7 tokens do not divide into 2"),
    "mask": ("cases: [{name: a, head: gpt2, mask_fraction: 1.0}]\n", "mask_fraction is 1.0"),
    "no seeds": ("cases: [{name: a, head: gpt2, seeds: []}]\n", "seeds is empty"),
    "bias of logits": ("cases: [{name: a, head: gpt2, level: logits, bias: true}]\n", "level must be hidden"),
    "factor": ("cases: [{name: a, head: gpt2, factor: 0.0}]\n", "factor is 0.0"),
    "gate": (
        "cases: [{name: a, head: gpt2, gates: {dhiden: 1.0}}]\n",
        "gates has 'dhiden', which is no quantity here; known: abs",
    ),
    "implementation": ("cases: [{name: a, head: gpt2, implementation: chunkd}]\n", "chunkd"),
    "temperature": ("cases: [{name: a, head: gpt2, temperature: 0.0}]\n", "temperature"),
}


def one_line_of_error(captured, command):
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith(f"logitless {command}: error: ")
    assert "Traceback" not in line
    return line


@pytest.mark.parametrize(("text", "message"), BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_bad_input_is_one_line_exit_2_and_nothing_written(text, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["gradcheck", write(tmp_path, text)]) == 2
    assert message in one_line_of_error(capsys.readouterr(), "gradcheck")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the first argument must be a YAML file"),
        (["--results_dir", "x"], "the first argument must be a YAML file"),
        (["nowhere.yaml"], "nowhere.yaml: no such file"),
        (["."], "cannot be read"),
        (["config.yaml", "--result_dir", "x"], "unrecognized arguments: --result_dir"),
        (["config.yaml", "--results_dir", "config.yaml"], "cannot make results folder 'config.yaml'"),
    ],
)
def test_bad_words_are_one_line_and_exit_2(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, f"cases: [{CASE}]\n")
    assert main(["gradcheck", *words]) == 2
    assert message in one_line_of_error(capsys.readouterr(), "gradcheck")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_bad_bench_config_is_one_line_and_exit_2(tmp_path, capsys):
    config = write(tmp_path, "name: x\narms: []\ntokens: [8]\ninputs: random\nhidden_size: 8\nvocab_size: 16\n")
    assert main(["bench", config]) == 2
    assert "arms is empty" in one_line_of_error(capsys.readouterr(), "bench")


def test_audit_exits_1_for_the_reference_and_0_for_chunked(tmp_path, capsys):
    config = write(tmp_path, "{implementation: reference, tokens: 64, hidden_size: 16, vocab_size: 4099, layout: VD}")
    assert main(["audit", config]) == 1
    assert "4099" in capsys.readouterr().out
    assert main(["audit", config, "--implementation", "chunked", "--block_sizes", "{block_v: 256}"]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokens: 8\n", "give head, or both"),
        ("{tokens: 7, sequences: 2, head: gpt2}", "do not divide"),
        ("{implementation: nothing, head: gpt2}", "nothing"),
        ("{head: gpt2, hidden_size: 3}", "not both"),
        ("{hidden_size: 0, vocab_size: 3}", "both must be positive"),
        ("{head: gtp2}", "nearest known: gpt2"),
    ],
)
def test_a_bad_audit_config_is_one_line_and_exit_2(text, message, tmp_path, capsys):
    assert main(["audit", write(tmp_path, text)]) == 2
    assert message in one_line_of_error(capsys.readouterr(), "audit")


def test_an_unknown_command_names_the_known_ones(capsys):
    assert main(["gradchek"]) == 2
    assert capsys.readouterr().err == (
        "logitless: error: no command 'gradchek'; choose from train, ab, bench, gradcheck, "
        "audit, plan, inspect (see logitless --help)\n"
    )


def test_ctrl_c_is_quiet_and_exits_130(tmp_path, capsys, monkeypatch):
    def interrupted(config):
        raise KeyboardInterrupt

    monkeypatch.setattr(gradcheck_cases, "run_gradcheck", interrupted)
    assert main(["gradcheck", write(tmp_path, f"cases: [{CASE}]\n")]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_bug_keeps_its_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(gradcheck_cases, "run_gradcheck", lambda config: np.zeros(3).reshape(2, 2))
    with pytest.raises(ValueError, match="cannot reshape"):
        main(["gradcheck", write(tmp_path, f"cases: [{CASE}]\n")])


@pytest.mark.parametrize("command", [*JOBS, *SECOND_WORDS])
def test_help_of_a_command_shows_an_example_and_the_exit_codes(command, capsys):
    assert main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: logitless {command} CONFIG.yaml" in text
    assert f"\n  logitless {command} configs/" in text
    assert "exit codes:" in text


def test_the_overview_names_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {command} " in text for command in (*JOBS, *SECOND_WORDS))
    assert main([]) == 2


def test_the_overview_does_not_wait_for_jax():
    # The package's __init__ may import jax; this is about what cli.py itself asks for.
    program = f"""
import sys, types
package = types.ModuleType("logitless")
package.__path__, package.__version__ = [{str(Path(gradcheck_cases.__file__).parents[1])!r}], "0"
sys.modules["logitless"] = package
from logitless.cli import main
assert main(["--help"]) == 0
assert "jax" not in sys.modules and "numpy" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_python_dash_m_is_the_command():
    run = subprocess.run([sys.executable, "-m", "logitless", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("logitless ")
