"""Verdicts: what counts as parity, and what does not."""

import json

import numpy as np
import pytest

from logitless.train.ab import strict_json
from logitless.train.ab_config import AbConfig, ParityConfig
from logitless.train.ab_report import page
from logitless.train.compare import Run, compare
from logitless.train.config import LossConfig, TrainConfig
from logitless.train.errors import TrainError

ARMS = [LossConfig(level="stock"), LossConfig(level="hidden")]
FIRST, SECOND = (arm.title for arm in ARMS)


def run(arm, seed, *, loss=0.0, reward=0.0, temp=100, seconds=1.0, updates=30, **more):
    """A run whose curves are known, with an offset in loss or reward."""
    rng = np.random.default_rng(seed)
    lines = []
    for step in range(1, updates + 1):
        line = {
            "step": step,
            "loss": 0.1 * rng.normal() + loss,
            "reward/mean": step / updates + reward + 0.05 * rng.normal(),
        }
        line |= {"kl": 0.01 * step, "grad_norm": 1.0, "entropy": 2.0, "time/train/step_s": seconds} | more
        lines.append(line)
    summary = {
        "memory": {"temp": temp},
        "device": "cpu",
        "jax": "0",
        "python": "3",
        "tokens_per_step": 8,
        "vocab_size": 9,
    }
    return Run(arm, seed, summary, lines)


def config(**changes):
    return AbConfig(**{"name": "x", "arms": ARMS, "train": TrainConfig(), **changes})


def failed(verdict):
    return [check.what for check in verdict.checks if not check.passed]


def test_equal_curves_have_parity():
    verdict = compare(config(), [run(FIRST, 0), run(SECOND, 0)])
    assert verdict.passed and verdict.parity == {SECOND: True}


@pytest.mark.parametrize(
    ("change", "what"),
    [({"loss": 2e-5}, "loss"), ({"kl": 5.0}, "kl"), ({"grad_norm": 1.002}, "grad_norm"), ({"kl": None}, "kl")],
    ids=["loss", "kl", "gradient", "no divergence"],
)
def test_one_number_beyond_its_bound_is_no_parity(change, what):
    verdict = compare(config(), [run(FIRST, 0), run(SECOND, 0, **change)])
    assert not verdict.passed and verdict.parity == {SECOND: False}
    assert f"error of {what} in the first 10" in failed(verdict)[0]
    assert all(f"error of {what}" in one for one in failed(verdict))


def test_rounding_may_grow_and_no_more():
    def pair(step, error):
        late = run(SECOND, 0)
        late.metrics[step - 1]["loss"] += error
        return failed(compare(config(), [run(FIRST, 0), late]))

    assert not pair(11, 9e-5) and "a later update" in pair(11, 1.1e-4)[0]
    assert not pair(10, 9e-7) and "the first 10 updates" in pair(10, 1.1e-6)[0]


def test_a_single_wrong_update_is_enough():
    bad = run(SECOND, 0)
    bad.metrics[17]["loss"] += 1e-3
    assert not compare(config(), [run(FIRST, 0), bad]).passed
    bad.metrics[17]["loss"] = float("nan")
    assert not compare(config(), [run(FIRST, 0), bad]).passed


def test_memory_and_reward_have_bounds_of_their_own():
    runs = [run(FIRST, 0), run(SECOND, 0, temp=60)]
    verdict = compare(config(max_temp_ratio=0.5, min_reward_rise=0.3), runs)
    assert failed(verdict) == ["temp memory of the update"] and verdict.parity[SECOND]
    assert verdict.ratios[SECOND]["temp"] == pytest.approx(0.6)
    assert compare(config(max_temp_ratio=0.6, min_reward_rise=0.3), runs).passed
    assert len(failed(compare(config(min_reward_rise=0.9), runs))) == 2


def test_the_time_is_a_median_without_the_updates_that_compile():
    slow = run(SECOND, 0, seconds=0.5)
    for line in slow.metrics[:5]:
        line["time/train/step_s"] = 100.0
    assert compare(config(), [run(FIRST, 0), slow]).ratios[SECOND]["step_time"] == pytest.approx(0.5)


FREE = {"rollouts": "free", "seeds": [0, 1, 2, 3]}


def spread_runs(**change):
    """Four seeds of each arm, whose rewards differ by seed."""
    rng = np.random.default_rng(3)
    offsets = rng.normal(0, 0.02, (2, 4))
    first = [run(FIRST, seed, reward=offsets[0, seed]) for seed in range(4)]
    reward = change.pop("reward", 0.0)
    return first + [run(SECOND, 10 + seed, reward=reward + offsets[1, seed], **change) for seed in range(4)]


def test_free_rollouts_are_judged_by_the_spread_over_seeds():
    assert compare(config(**FREE), spread_runs()).passed
    verdict = compare(config(**FREE), spread_runs(reward=-0.3))
    assert len(failed(verdict)) == 1 and "reward/mean" in failed(verdict)[0]
    verdict = compare(config(**FREE), spread_runs(loss=0.5))
    assert len(failed(verdict)) == 1 and "of loss" in failed(verdict)[0]


def test_a_wider_confidence_forgives_more():
    runs = spread_runs(reward=-0.06)
    narrow, wide = (config(**FREE, parity=ParityConfig(confidence=c, reward_margin=1.0)) for c in (0.5, 0.9999))
    assert not compare(narrow, runs).passed and compare(wide, runs).passed


def test_few_seeds_that_differ_much_do_not_excuse_another_reward():
    rewards = (-0.4, 0.4)
    runs = [run(FIRST, seed, reward=rewards[seed]) for seed in range(2)]
    runs += [run(SECOND, 10 + seed, reward=rewards[seed] - 0.2) for seed in range(2)]
    pair = {"rollouts": "free", "seeds": [0, 1]}
    assert [what for what in failed(compare(config(**pair), runs)) if "reward" in what]
    wide = config(**pair, parity=ParityConfig(reward_margin=1.0))
    assert not [what for what in failed(compare(wide, runs)) if "reward" in what]


def test_where_no_gradient_is_there_any_other_has_no_parity():
    def pair(norm):
        return compare(config(), [run(FIRST, 0, grad_norm=0.0), run(SECOND, 0, grad_norm=norm)])

    assert pair(0.0).passed
    assert "grad_norm" in failed(pair(1e-9))[0]


def test_numbers_that_json_has_not_are_recorded_in_words():
    runs = [run(FIRST, 0), run(SECOND, 0, loss=float("nan"))]
    record = strict_json(recorded(runs, compare(config(), runs)))
    assert json.loads(json.dumps(record, allow_nan=False))["verdict"]["checks"][0]["value"] == "inf"
    assert ">inf<" in page(record)


def recorded(runs, verdict):
    return {
        "name": "a <b>",
        "date": "2026-01-01T00:00:00",
        "commit": "0" * 40,
        "dirty": False,
        "config": {
            "train": {"steps": 30, "model": {"source": "tiny"}, "data": {"task": "sums"}},
            "rollouts": "shared",
            "seeds": [0],
        },
        "runs": [{"arm": r.arm, "seed": r.seed, "summary": r.summary, "metrics": r.metrics} for r in runs],
        "verdict": verdict.as_record(),
    }


def test_the_page_names_every_commit():
    runs = [run(FIRST, 0), run(SECOND, 0)]
    runs[1].summary["commits"] = [{"commit": "1" * 40, "dirty": True}]
    assert "commit 0000000000 and 1111111111 with changes" in page(recorded(runs, compare(config(), runs)))


def test_the_page_says_what_failed_and_stands_alone():
    runs = [run(FIRST, 0), run(SECOND, 0, loss=1.0)]
    verdict = compare(config(), runs)
    text = page(recorded(runs, verdict))
    assert "A check failed." in text and "FAILED" in text and "a &lt;b&gt;" in text
    assert text.count("<svg") == 7
    outside = [part for part in text.split('"') if part.startswith(("http:", "https:")) and "w3.org" not in part]
    assert not [link for link in outside if "purl.org" not in link and "creativecommons" not in link]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": ARMS[:1]}, "arms has 1 loss section"),
        ({"arms": [ARMS[0], ARMS[0]]}, "two arms are called alike"),
        ({"seeds": []}, "give at least one"),
        ({"seeds": [1, 1]}, "each once"),
        ({"rollouts": "free"}, "two or more seeds"),
        ({"parity": ParityConfig(early_updates=0)}, "early_updates=0"),
        ({"parity": ParityConfig(confidence=1.0)}, "must lie between 0 and 1"),
        ({**FREE, "parity": ParityConfig(last_updates=0)}, "last_updates=0"),
        ({"min_reward_rise": 0.1, "train": TrainConfig(steps=19)}, "train.steps=19 is too few"),
        ({"arms": [*ARMS, LossConfig(level="stock", name="dapo", label="x")]}, "level=stock has grpo and gspo alone"),
    ],
)
def test_bad_configs(changes, message):
    with pytest.raises(TrainError, match=message):
        config(**changes)
