import dataclasses
import importlib.util
import json
import sys

import jax
import numpy as np
import pytest

from logitless.bench import plan_calibrate
from logitless.cli import main
from logitless.plan import CHIPS, calibration, planner, public_timings
from logitless.plan.calibrate import KNOTS, Sample, calibrate, fit, plan_timed, sample_of
from logitless.plan.calibration import (
    FILE,
    expected_kernel_ms,
    expected_program_ms,
    read_calibration,
    shipped,
    spread_words,
)
from logitless.plan.estimate import estimate
from logitless.plan.hlo import parse
from logitless.plan.report import ESTIMATE, KernelPlan, ProgramPlan

POINTS = ((0.5, 1.0), (0.7, 1.1), (1.0, 1.4))
TRUE_FACTORS = (1.03, 1.1, 1.1, 1.35)
COPY_FACTOR = 1.3


def made_up(ratio, *, schedule_ms=10.0, copies_dma_ms=0.0, other_ms=0.0, error=1.0, held_out=False):
    """A program with one kernel, which took what the true factors say, times an error."""
    true = tuple(zip(KNOTS, TRUE_FACTORS, strict=True))
    kernel_ms = expected_kernel_ms(schedule_ms, ratio * schedule_ms, true)
    return Sample(
        xla_ms=other_ms + 3 * copies_dma_ms,
        copies_ms=3 * copies_dma_ms,
        copies_dma_ms=copies_dma_ms,
        kernels=((schedule_ms, ratio * schedule_ms),),
        measured_ms=(other_ms + COPY_FACTOR * copies_dma_ms + kernel_ms) * error,
        held_out=held_out,
    )


def some_samples():
    """Over the whole range and beyond it, every second one with copies by XLA."""
    ratios = np.linspace(0.1, 1.3, 25).tolist()
    return [made_up(r, schedule_ms=5.0 + i, copies_dma_ms=2.0 * (i % 2), other_ms=0.5) for i, r in enumerate(ratios)]


def without_kernel(estimate_ms, measured_ms):
    return Sample(estimate_ms, 0.0, 0.0, (), measured_ms)


def test_a_known_factor_is_recovered():
    points, copy_factor = fit(some_samples())
    assert [knot for knot, _ in points] == list(KNOTS)
    assert [factor for _, factor in points] == pytest.approx(TRUE_FACTORS, abs=1e-3)
    assert copy_factor == pytest.approx(COPY_FACTOR, abs=1e-3)


def test_the_factor_never_falls():
    falling = [made_up(r, error=2.0 - r) for r in (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0)]
    factors = [factor for _, factor in fit(falling)[0]]
    assert factors == sorted(factors)
    assert factors[0] > 1.2


def test_held_out_programs_do_not_enter_the_fit():
    wrong = [made_up(r, error=5.0, held_out=True) for r in (0.2, 0.6, 0.8, 1.0)]
    found = calibrate([*some_samples(), *wrong, without_kernel(10.0, 8.0)], {})
    assert [factor for _, factor in found.points] == pytest.approx(TRUE_FACTORS, abs=1e-3)
    assert (found.fitted.rows, found.held_out.rows, found.xla.rows) == (25, 4, 1)
    assert found.fitted.most == pytest.approx(1.0, abs=1e-3)
    assert found.held_out.least == pytest.approx(5.0, rel=1e-3)
    assert found.held_out.rms == pytest.approx(np.log(5.0), rel=1e-3)


def test_programs_without_a_kernel_keep_the_estimate_of_xla():
    held_out = [made_up(0.2, held_out=True)] * 4
    found = calibrate([*some_samples(), *held_out, without_kernel(10.0, 8.0), without_kernel(10.0, 12.0)], {})
    assert (found.xla.least, found.xla.most) == (0.8, 1.2)
    assert str(found.xla) == "0.80 to 1.20 times the estimate (2 programs)"


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (some_samples()[:4], "0 programs held out, 0 without a kernel; at least 4 and 1"),
        ([made_up(0.2, held_out=True)] * 4 + [without_kernel(1.0, 1.0)], "0 programs for a factor of 4 knots"),
    ],
    ids=["none-held-out", "too-few"],
)
def test_too_few_programs_to_calibrate(samples, said):
    with pytest.raises(ValueError, match=said):
        calibrate(samples, {})


PROGRAM = """\
HloModule m
%moves (p: f32[8,256]) -> f32[8,128] {
  %p = f32[8,256]{1,0} parameter(0)
  ROOT %cut = f32[8,128]{1,0} slice(%p), slice={[0:8], [0:128]}
}
%adds (p: f32[8,256]) -> f32[8,128] {
  %p = f32[8,256]{1,0} parameter(0)
  %cut = f32[8,128]{1,0} slice(%p), slice={[0:8], [0:128]}
  ROOT %sum = f32[8,128]{1,0} add(%cut, %cut)
}
ENTRY %main (x: f32[8,256]) -> f32[8,128] {
  %x = f32[8,256]{1,0} parameter(0)
  %a = f32[8,128]{1,0} fusion(%x), kind=kLoop, calls=%moves, backend_config={"estimated_cycles":"100"}
  %b = f32[8,128]{1,0} fusion(%x), kind=kLoop, calls=%adds, backend_config={"estimated_cycles":"1000"}
  ROOT %c = f32[8,128]{1,0} slice(%x), slice={[0:8], [0:128]}, backend_config={"estimated_cycles":"10"}
}
"""


def test_what_only_copies_is_told_from_what_computes():
    sums = estimate(parse(PROGRAM))
    assert (sums.cycles, sums.copy_cycles) == (1110, 110)
    # Two pieces of 8 x 128 float32, each read and written.
    assert sums.copy_bytes == 2 * 2 * 8 * 128 * 4


def test_another_calibration_reaches_a_plan_that_is_in_the_cache(monkeypatch):
    plan = ProgramPlan("v6e", fits=True, reason=None, hbm_bytes=1, xla_ms=5.0, copies_ms=4.0, copies_dma_ms=2.0)
    chip = CHIPS["v6e"]
    for copy_factor in (1.0, 2.0):
        found = dataclasses.replace(shipped(), copy_factor=copy_factor)
        monkeypatch.setattr(calibration, "shipped", lambda found=found: found)
        assert planner._with_expected(plan, chip).expected_ms == pytest.approx(1.0 + 2.0 * copy_factor)


@pytest.mark.parametrize(
    ("dma_ms", "expected_ms"),
    [(0.0, 10.0), (5.0, 10.0), (6.0, 10.5), (7.0, 11.0), (8.5, 12.5), (10.0, 14.0), (20.0, 28.0), (None, 10.0)],
    ids=["no-copies", "first", "between", "knot", "between-later", "last", "bound-by-copies", "unknown-copies"],
)
def test_a_kernel_at_and_between_the_points(dma_ms, expected_ms):
    assert expected_kernel_ms(10.0, dma_ms, POINTS) == pytest.approx(expected_ms)


def test_a_kernel_that_only_copies_takes_what_its_copies_take():
    assert expected_kernel_ms(0.0, 10.0, POINTS) == pytest.approx(14.0)
    assert expected_kernel_ms(0.0, None, POINTS) == 0.0


def test_copies_of_xla_count_by_their_bytes():
    assert expected_program_ms(10.0, 8.0, 3.0, [(10.0, 5.0)], POINTS, 1.5) == pytest.approx(2.0 + 4.5 + 10.0)


def test_what_ships():
    found = shipped()
    factors = [factor for _, factor in found.points]
    assert found.chip == "v6e"
    assert factors == sorted(factors)
    assert 0.9 < factors[0] < 1.2
    assert found.fitted.rows >= 12
    assert found.held_out.rows >= 4
    assert {"commit", "date", "versions", "times"} <= set(found.origin)
    assert found.origin["versions"]["tokamax"] == public_timings.TOKAMAX


def test_every_record_says_what_an_estimate_is_worth():
    record = ProgramPlan("v6e", fits=True, reason=None, hbm_bytes=1).record()
    assert record["kind"] == ESTIMATE
    assert record["spread"] == spread_words()
    assert str(shipped().xla) in record["spread"]
    assert str(shipped().held_out) in record["spread"]
    assert "nothing is known of other chips" in record["spread"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot read the calibration plan.json: No such file"),
        ("{", "the calibration plan.json is no JSON"),
        ("[]", "the calibration plan.json is not as it should be"),
        ('{"points": []}', "not as it should be: no 'fitted'"),
        ({"points": []}, "has points []"),
        ({"points": [[0.5, 1.1], [0.7, 1.0]]}, "factors must be above 0 and not fall"),
        ({"points": [[0.7, 1.0], [0.5, 1.1]]}, "ratios must rise"),
        ({"fitted": {"rows": 3}}, "not as it should be: missing"),
    ],
    ids=["missing", "broken", "list", "key", "no-points", "falling", "unordered", "spread"],
)
def test_a_calibration_that_cannot_be_used(tmp_path, text, said):
    path = tmp_path / "plan.json"
    if isinstance(text, dict):
        text = json.dumps(json.loads(FILE.read_text(encoding="utf-8")) | text)
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=said.replace("[]", r"\[\]")) as caught:
        read_calibration(path)
    assert "logitless plan calibrate --out FILE" in str(caught.value)


def entry(tokens, hidden_size, vocab_size, reduction="mean", **more):
    key = {"x": f"bf16[{tokens},{hidden_size}]", "labels": f"i32[{tokens}]", "w": f"bf16[{hidden_size},{vocab_size}]"}
    key |= {"reduction": reduction, "return_residuals": False} | more
    config = {"b_block_size": 1024, "h_block_size": 512, "v_block_size": 2048, "buffer_count": [3, 2]}
    return {json.dumps(key): {json.dumps(config): {"evaluation_times_ms": [3.0, 1.0, 2.0, 9.0, 2.5]}}}


@pytest.fixture
def tokamax(tmp_path, monkeypatch):
    """A folder that holds timings as tokamax has them."""
    folder = tmp_path / "tokamax" / public_timings.FOLDER
    folder.mkdir(parents=True)
    entries = entry(1024, 4096, 151936) | entry(1024, 5120, 151936) | entry(2048, 4096, 151936)
    entries |= entry(1024, 4096, 151936, reduction="sum") | entry(1024, 4096, 151936, x="f32[1024,4096]")
    for name in ("pallas_mosaic_tpu_", "", "chunked_xla_"):
        for suffix in ("", "_vjp"):
            path = folder / f"{name}{public_timings.OP}{suffix}.json"
            path.write_text(json.dumps(entries if name.startswith("pallas") else {}))
    monkeypatch.setattr(public_timings, "tokamax_folder", lambda: tmp_path / "tokamax")
    return folder


def test_the_rule_chooses_programs_and_holds_a_head_out(tokamax):
    rows = public_timings.public_timings()
    assert [(row.direction, row.hidden_size, row.tokens, row.held_out) for row in rows] == [
        ("backward", 4096, 1024, False),
        ("forward", 4096, 1024, False),
        ("backward", 5120, 1024, True),
        ("forward", 5120, 1024, True),
    ]
    assert rows[0].measured_ms == 2.5
    assert rows[0].config["buffer_count"] == (3, 2)
    assert "buffer_count" not in rows[1].config


@pytest.mark.parametrize("content", ['{"a": 1}', "{", '{"{\\"x\\": \\"f32\\", \\"w\\": \\"f32\\"}": {}}'])
def test_timings_in_another_form(tokamax, content):
    (tokamax / f"chunked_xla_{public_timings.OP}.json").write_text(content)
    with pytest.raises(public_timings.TimingsMissing, match=r"cannot read tokamax's chunked_xla_.*pip install tokamax"):
        public_timings.public_timings()


def plan_of(row, **options):
    """As the compiler would say of a program, were the copies half of the schedule."""
    if row.direction == "forward" and row.held_out:
        return ProgramPlan("v6e", fits=False, reason="out of HBM", hbm_bytes=1)
    kernel = KernelPlan("k", (), 1.0, schedule_ms=2.0, dma_ms=1.0)
    kernels = (kernel,) if row.code == "pallas" else ()
    return ProgramPlan("v6e", fits=True, reason=None, hbm_bytes=1, xla_ms=0.1, kernels=kernels)


def timing(code, tokens, *, held_out=False, direction: public_timings.Direction = "backward"):
    return public_timings.Timing(code, direction, tokens, 4096, 151936, {}, (2.2, 2.3, 2.1), held_out)


def test_the_command_records_and_shows_estimate_against_measured(tmp_path, monkeypatch, capsys):
    rows = [timing("pallas", n) for n in range(1, 9)] + [timing("pallas", n, held_out=True) for n in range(4)]
    rows += [timing("plain", 1), timing("pallas", 9, held_out=True, direction="forward")]
    monkeypatch.setattr(plan_calibrate, "public_timings", lambda: rows)
    monkeypatch.setattr(plan_calibrate, "plan_timed", plan_of)
    monkeypatch.setattr(plan_calibrate, "versions", lambda platform: {"libtpu": "0.0.52"})
    out = tmp_path / "fit.json"
    words = ["plan", "calibrate", "--out", str(out), "--results", str(tmp_path)]
    # One program does not compile.
    assert main(words) == 1
    said = capsys.readouterr().out
    assert said.count(ESTIMATE) == 2
    assert "out of HBM" in said
    assert "the factors that ship are others" in said
    records = [json.loads(line) for line in (tmp_path / "plan_calibration.jsonl").read_text().splitlines()]
    assert len(records) == len(rows)
    assert records[0]["versions"] == {"libtpu": "0.0.52", "tokamax": "0.0.17"}
    assert records[0]["measured_over_expected"] == pytest.approx(1.0, abs=1e-3)
    assert records[-1]["expected_ms"] is None
    found = read_calibration(out)
    assert (found.fitted.rows, found.held_out.rows, found.xla.rows) == (8, 4, 1)
    assert found.origin["commit"] == records[0]["commit"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--outt", "x"], "unknown: --outt x; it takes --out FILE"),
        (["--out"], "expected one argument"),
        (["--out", "{folder}/none/x.json"], "there is no folder"),
    ],
)
def test_words_without_meaning_are_one_line(tmp_path, capsys, words, said):
    words = [word.format(folder=tmp_path) for word in words]
    assert main(["plan", "calibrate", "--results", str(tmp_path), *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_help_of_calibrate(capsys):
    assert main(["plan", "calibrate", "--help"]) == 0
    assert "tokamax 0.0.17" in capsys.readouterr().out


@pytest.mark.parametrize("version", [None, "0.0.16"], ids=["none", "another"])
def test_without_tokamax_one_line_says_what_to_install(tmp_path, monkeypatch, capsys, version):
    metadata = public_timings.metadata

    def distribution(name):
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return type("Distribution", (), {"version": version})

    monkeypatch.setattr(public_timings.sys, "version_info", FakeVersion((3, 12, 1)))
    monkeypatch.setattr(metadata, "distribution", distribution)
    assert main(["plan", "calibrate", "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert ("0.0.16 is installed" if version else "is not installed") in error
    assert "pip install tokamax==0.0.17" in error
    assert error.count("\n") == 1


class FakeVersion(tuple):
    major, minor = property(lambda self: self[0]), property(lambda self: self[1])


def test_an_older_python_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(public_timings.sys, "version_info", FakeVersion((3, 11, 7)))
    assert main(["plan", "calibrate", "--results", str(tmp_path)]) == 2
    assert "Python 3.11; tokamax, whose public timings are read, needs 3.12" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_kernel_with_its_real_time():
    for name in ("tokamax", "libtpu"):
        if importlib.util.find_spec(name) is None or sys.version_info < (3, 12):
            pytest.skip(f"{name} is not installed: {public_timings.INSTALL}")
    rows = public_timings.public_timings()
    row = next(r for r in rows if (r.code, r.direction, r.tokens, r.hidden_size) == ("pallas", "forward", 1024, 5120))
    # tokamax is not written for the strict promotion of these tests.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        x = sample_of(row, plan_timed(row, use_cache=False))
    assert x is not None
    assert x.held_out
    found = shipped()
    assert x.measured_ms / x.expected_ms(found.points, found.copy_factor) == pytest.approx(1.0, abs=0.1)
