"""Policies: a folder as Hugging Face writes it, and what is wrong with others."""

import json

import pytest

pytest.importorskip("tunix", reason="google-tunix is not installed (pip install '.[train]')")

import numpy as np
from flax import nnx  # pyright: ignore[reportMissingImports]
from safetensors.numpy import save_file  # pyright: ignore[reportMissingImports]
from tokenizers import Tokenizer, models, pre_tokenizers  # pyright: ignore[reportMissingImports]

from logitless.train.config import ModelConfig, TinyModel
from logitless.train.errors import TrainError
from logitless.train.models import expected_tensors, load_policy
from logitless.train.tokenizer import CHARACTERS, CharacterTokenizer

DESCRIBED = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
SIZES = {"embed_dim": 16, "hidden_dim": 24, "num_heads": 4, "head_dim": 4, "num_kv_heads": 2, "num_layers": 2}


def write_folder(folder, *, tied=True, words=38, change=None, described=None):
    """A checkpoint of Qwen2.5 in small; `change` edits its tensors before they are written."""
    sizes = SIZES | {"vocab_size": 40, "use_tied_embedding": tied}
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in expected_tensors(sizes).items()}
    if change:
        change(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(DESCRIBED | {"tie_word_embeddings": tied} | (described or {})))
    vocabulary = {f"w{i}": i for i in range(words - 2)} | {"<|endoftext|>": words - 2, "<|im_end|>": words - 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tensors


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_is_loaded_with_its_own_weights(tmp_path, tied):
    tensors = write_folder(tmp_path, tied=tied)
    policy = load_policy(ModelConfig(source=str(tmp_path)), 0)
    np.testing.assert_array_equal(policy.model.embedder.input_embedding[...], tensors["model.embed_tokens.weight"])
    query = policy.model.layers[1].attn.q_proj.w[...]
    np.testing.assert_array_equal(query.reshape(16, 16).T, tensors["model.layers.1.self_attn.q_proj.weight"])
    if not tied:
        np.testing.assert_array_equal(policy.model.lm_head.w[...].T, tensors["lm_head.weight"])
    assert (policy.tokenizer.eos_id(), policy.tokenizer.pad_id()) == (37, 36)
    assert policy.tokenizer.encode("w3 w5<|im_end|>") == [3, 5, 37]
    assert "{question}" in policy.template


def test_the_dtype_is_that_of_the_config(tmp_path):
    write_folder(tmp_path)
    policy = load_policy(ModelConfig(source=str(tmp_path), dtype="bfloat16"), 0)
    assert {str(x.dtype) for x in nnx.to_flat_state(nnx.state(policy.model)).leaves} == {"bfloat16"}


def drop(name):
    return lambda tensors: tensors.pop(name)


def widen(tensors):
    tensors["model.norm.weight"] = np.ones(17, np.float32)


BAD = [
    (
        {"change": drop("model.layers.1.mlp.up_proj.weight")},
        r"model\.layers\.1\.mlp\.up_proj\.weight \[24, 16\] is missing",
    ),
    ({"change": widen}, r"model\.norm\.weight has shape \[17\], needed \[16\]"),
    ({"words": 44}, "the tokenizer has 44 ids and the head 40 rows"),
    ({"described": {"model_type": "llama"}}, "model_type='llama'; supported is qwen2"),
]


@pytest.mark.parametrize(("folder", "message"), BAD, ids=["missing tensor", "shape", "vocabulary", "another model"])
def test_a_folder_that_does_not_fit_is_refused_in_one_line(tmp_path, folder, message):
    write_folder(tmp_path, **folder)
    with pytest.raises(TrainError, match=message) as raised:
        load_policy(ModelConfig(source=str(tmp_path)), 0)
    assert "\n" not in str(raised.value)


def test_a_cut_checkpoint_is_refused(tmp_path):
    write_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TrainError, match=r"model\.safetensors is cut: it holds"):
        load_policy(ModelConfig(source=str(tmp_path)), 0)
    path.write_bytes(b"\xff" * 30)
    with pytest.raises(TrainError, match="is cut or no safetensors"):
        load_policy(ModelConfig(source=str(tmp_path)), 0)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path, name):
    write_folder(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(TrainError, match=name.replace("model", r"\*").replace(".", r"\.")):
        load_policy(ModelConfig(source=str(tmp_path)), 0)


def test_a_source_that_is_nothing():
    with pytest.raises(TrainError, match="neither tiny, smollm2, a folder, nor a hub id"):
        load_policy(ModelConfig(source="./no/such/folder"), 0)


def test_a_hub_id_without_the_hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import huggingface_hub.constants  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(TrainError, match="not to be had from the hub"):
        load_policy(ModelConfig(source="Qwen/Qwen2.5-0.5B-Instruct"), 0)


def test_random_weights_depend_on_the_seed_alone():
    tiny = ModelConfig(tiny=TinyModel(vocab_size=128, hidden_size=8, num_layers=1, num_heads=2, mlp_size=8))
    leaves = [nnx.to_flat_state(nnx.state(load_policy(tiny, seed).model)).leaves for seed in (0, 0, 1)]
    same = [all(np.array_equal(a[...], b[...]) for a, b in zip(leaves[0], other, strict=True)) for other in leaves[1:]]
    assert same == [True, False]


def test_a_vocabulary_that_is_smaller_than_the_tokenizers():
    with pytest.raises(TrainError, match="the head 64 rows"):
        load_policy(ModelConfig(tiny=TinyModel(vocab_size=64)), 0)


def test_characters_come_back_and_unknown_ones_are_seen():
    tokenizer = CharacterTokenizer()
    assert tokenizer.decode(tokenizer.encode(CHARACTERS)) == CHARACTERS
    assert tokenizer.decode(tokenizer.encode("ü")) == "?"
    assert tokenizer.decode([tokenizer.pad_id(), tokenizer.eos_id(), 40_000]) == "?"
