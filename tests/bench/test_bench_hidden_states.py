"""The word problems, and how they become rows, rewards and hidden states."""

import re
import zipfile

import numpy as np
import pytest

from logitless.bench.child import Child, ChildFailed
from logitless.bench.hidden_states import (
    GROUP,
    Problem,
    build_rows,
    completions,
    content_key,
    group_normalised,
    off_policy,
    word_problems,
)
from logitless.bench.run import _is_whole

OPERATIONS = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}


def value(expression: str) -> float:
    """From left to right, products first: enough for the lines of the answers."""
    parts = re.findall(r"\d+|[-+*/]", expression)
    for operators in ("*/", "+-"):
        rest = parts[:1]
        for operator, number in zip(parts[1::2], parts[2::2], strict=True):
            if operator in operators:
                rest[-1] = str(int(OPERATIONS[operator](int(rest[-1]), int(number))))
            else:
                rest += [operator, number]
        parts = rest
    return int(parts[0])


def test_the_word_problems_are_right():
    problems = word_problems()
    assert len(problems) >= 36
    assert len({problem.question for problem in problems}) == len(problems)
    for problem in problems:
        steps = re.findall(r"([\d+\-*/ ]*\d) = (\d+)", problem.answer)
        assert steps, problem.question
        for expression, result in steps:
            assert value(expression) == int(result), problem.answer
        assert int(steps[-1][1]) == problem.number, problem.answer


def test_a_group_has_right_and_wrong_completions_and_rewards_tell_them_apart():
    for index, problem in enumerate(word_problems()):
        group = completions(problem, index)
        rewards = [reward for _, reward in group]
        assert len(group) == GROUP and 0 < sum(rewards) < GROUP
        for text, reward in group:
            assert text.endswith(f"#### {problem.number}") == bool(reward)


def test_rows_are_padded_on_both_sides_as_a_trainer_does():
    problems = [Problem("a", "x\n#### 1"), Problem("longer", "y" * 80 + "\n#### 2")]
    rows = build_rows(problems, lambda text: [ord(letter) for letter in text], pad=0, length=40)
    assert rows.tokens.shape == rows.valid.shape == (2 * GROUP, rows.prompt_length + 40)
    assert not rows.valid[0, :5].any() and rows.valid[-1, 0]
    first = rows.tokens[0, rows.prompt_length :][rows.valid[0, rows.prompt_length :]]
    assert "".join(map(chr, first)) == "x\n#### 1<|im_end|>"
    # The long worked answer is cut where the token limit cuts it.
    assert rows.valid[GROUP, rows.prompt_length :].all()
    assert (rows.tokens[~rows.valid] == 0).all()


def test_advantages_sum_to_zero_in_each_group():
    advantages = group_normalised(np.array([1, 0, 0, 0, 1, 1, 0, 1], np.float32)).reshape(2, 4)
    np.testing.assert_allclose(advantages.sum(axis=1), 0, atol=1e-6)
    np.testing.assert_allclose(advantages[0], [1.4997, -0.4999, -0.4999, -0.4999], atol=1e-4)


def test_the_older_policy_is_deterministic_and_clear_of_the_clip_bounds():
    logprobs = np.linspace(-9, 0, 4000, dtype=np.float32).reshape(40, 100)
    old = off_policy(logprobs)
    np.testing.assert_array_equal(old, off_policy(logprobs))
    ratio = np.exp(logprobs - old)
    assert np.abs(ratio - 0.8).min() > 0.02 and np.abs(ratio - 1.2).min() > 0.02
    assert 0.08 < ((ratio < 0.8) | (ratio > 1.2)).mean() < 0.17


def test_the_key_follows_the_wheel():
    assert content_key("a") != content_key("b")
    assert content_key("a") == content_key("a")


def test_a_cut_archive_is_not_taken_for_whole(tmp_path):
    path = tmp_path / "arrays.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", b"0" * 1000)
    assert _is_whole(path)
    path.write_bytes(path.read_bytes()[:-30])
    assert not _is_whole(path)


@pytest.mark.slow
def test_the_child_says_what_is_wrong_with_the_wheel(tmp_path):
    with zipfile.ZipFile(tmp_path / "empty.whl", "w") as archive:
        archive.writestr("a.txt", "")
    with Child("logitless.bench.hidden_states") as child, pytest.raises(ChildFailed, match="holds 0 GGUF files"):
        child.ask({"wheel": str(tmp_path / "empty.whl"), "out": str(tmp_path / "out.npz")}, 60.0)
    assert [path.name for path in tmp_path.iterdir()] == ["empty.whl"]


@pytest.mark.slow
def test_qwen2_of_tunix_gives_the_hidden_states_of_a_llama(tmp_path):
    """Against a forward pass in numpy, at a tiny size: heads, rotation, norms and un-transposed weights all count."""
    pytest.importorskip("tunix", reason="the model code: pip install 'logitless[train]'")
    script = tmp_path / "compare.py"
    script.write_text(COMPARE)
    import subprocess
    import sys

    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


# In a process of its own: Tunix warns when it is imported, and here warnings are errors.
COMPARE = """
import numpy as np
from logitless.bench.hidden_states import forward, load_qwen2
from logitless.bench.smollm2 import LlamaShape, Weights

shape = LlamaShape(2, 16, 24, 4, 2, 30, 1e5, 1e-5)
rng = np.random.default_rng(0)
draw = lambda *size: rng.standard_normal(size).astype(np.float32) / 4
tensors = {"token_embd.weight": draw(30, 16), "output_norm.weight": 1 + draw(16)}
for i in range(2):
    sizes = {"attn_norm": (16,), "ffn_norm": (16,), "attn_q": (16, 16), "attn_k": (8, 16), "attn_v": (8, 16)}
    sizes |= {"attn_output": (16, 16), "ffn_gate": (24, 16), "ffn_up": (24, 16), "ffn_down": (16, 24)}
    tensors |= {f"blk.{i}.{name}.weight": draw(*size) for name, size in sizes.items()}
tokens = rng.integers(0, 30, (1, 7)).astype(np.int32)

def norm(x, w):
    return w * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)

def rotate(x):
    angle = np.arange(7)[:, None] / 1e5 ** (np.arange(2) / 2)
    a, b = x[..., :2], x[..., 2:]
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

x = tensors["token_embd.weight"][tokens[0]]
for i in range(2):
    w = lambda name: tensors[f"blk.{i}.{name}.weight"]
    h = norm(x, w("attn_norm"))
    q = rotate((h @ w("attn_q").T).reshape(7, 4, 4))
    k, v = (h @ w("attn_k").T).reshape(7, 2, 4), (h @ w("attn_v").T).reshape(7, 2, 4)
    k, v = rotate(k).repeat(2, 1), v.repeat(2, 1)
    scores = np.einsum("thd,shd->hts", q, k) / 2
    scores = np.where(np.tril(np.ones((7, 7), bool)), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    x = x + np.einsum("hts,shd->thd", p, v).reshape(7, 16) @ w("attn_output").T
    h = norm(x, w("ffn_norm"))
    gate = h @ w("ffn_gate").T
    x = x + (gate / (1 + np.exp(-gate)) * (h @ w("ffn_up").T)) @ w("ffn_down").T
want = norm(x, tensors["output_norm.weight"])

model = load_qwen2(Weights(shape, tensors, [], [], []))
# Left padding must change nothing.
padded = np.concatenate([np.zeros((1, 3), np.int32), tokens], axis=1)
valid = np.arange(10)[None] >= 3
np.testing.assert_allclose(np.asarray(forward(model, padded, valid))[0, 3:], want, atol=2e-5)
"""
