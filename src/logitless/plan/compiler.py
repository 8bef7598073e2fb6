"""The compiler in a process of its own: environment, time limit, and nothing left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from logitless.plan.bundles import ALLOCATIONS, BUNDLES, SLOTS
from logitless.plan.chips import Topology
from logitless.plan.program import Program

CHILD = Path(__file__).with_name("compile_child.py")
WAIT_AFTER_KILL_S = 10.0
OUT_OF_HBM = "out of HBM"

# What keeps libtpu quiet and out of the way on a machine without a TPU; the last one lets two of them run at once.
_ENVIRONMENT = {
    "tpu": {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v6e-4",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    },
    "cuda": {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
}
_NEEDED = {
    "tpu": ("jax", "jaxlib", "libtpu", "flatbuffers"),
    "cuda": ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "flatbuffers"),
}
_INSTALL = {
    "tpu": "pip install 'logitless[tpu]'",
    "cuda": "name an environment that has them as `python` (Python 3.12: pip install 'jax[cuda13]' flatbuffers)",
}


# The caller's own flags would change what is compiled, or write where nothing of ours should be.
_NOT_HANDED_ON = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_COMPILATION_CACHE_DIR", "JAX_DUMP_IR_TO", "JAX_ENABLE_X64")
_VERSIONS = """
import json, sys
from importlib import metadata
found = {package.metadata["Name"]: package.version for package in metadata.distributions()}
print(json.dumps({name: found.get(name) for name in sys.argv[1:]}))
"""


class CompilerMissing(ValueError):
    """The compiler for a chip is not installed where it was looked for."""


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program.

    Attributes:
        sizes: bytes on one device: `temp`, `argument`, `output`, `alias`.
        seconds: that it took.
        hlo: the compiled program as text.
        schedules: the folder of the kernels' schedules, there until the context of `compiled` ends; None without any.
    """

    sizes: dict[str, int]
    seconds: float
    hlo: str
    schedules: Path | None


class CompileFailed(Exception):
    """The compiler refused, died or was stopped: `str(error)` says why in a line.

    Attributes:
        needed_bytes: of HBM, where it says that they are too many.
        lasting: whether it would fail again, unlike one that was stopped.
    """

    def __init__(self, reason: str, needed_bytes: int | None = None, *, lasting: bool = False) -> None:
        super().__init__(reason)
        self.needed_bytes, self.lasting = needed_bytes, lasting


def versions(platform: str, python: str = sys.executable) -> dict[str, str]:
    """The versions of the compiler and what it needs in the environment of an interpreter.

    Raises:
        CompilerMissing: one of them is not there, or the interpreter cannot be run.
    """
    try:
        done = subprocess.run(
            [python, "-c", _VERSIONS, *_NEEDED[platform]], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerMissing(f"plan: cannot run python={python!r}: {error}") from None
    found = json.loads(done.stdout)
    missing = [name for name, version in found.items() if version is None]
    if missing:
        raise CompilerMissing(f"plan: {', '.join(missing)} not installed for platform {platform}: {_INSTALL[platform]}")
    return found


@contextmanager
def compiled(
    program: Program, where: Topology, *, timeout_s: float, python: str = sys.executable, schedules: bool = True
) -> Iterator[Compiled]:
    """Compiles a program in a child process; its files are gone when the context ends.

    Without `schedules` those of its kernels are not written out: the compiler writes out those of all instructions,
    thousands of files for a whole training step.

    Raises:
        ValueError: the compiler knows no such topology.
        CompileFailed: the program does not compile for this chip, or not within the time.
    """
    with tempfile.TemporaryDirectory(prefix="logitless-plan-") as scratch:
        folder = Path(scratch)
        (folder / "program.bin").write_bytes(program.content)
        request = {
            "platform": where.chip.platform,
            "topology": where.compiler_name if where.chip.platform == "tpu" else "",
            "target_config": where.chip.target,
            "mesh": None if program.mesh is None else [list(axis) for axis in program.mesh],
            "donate": list(program.donated),
        }
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        written = folder / "schedules" if schedules and program.has_kernels else None
        answer = _ask(folder, _environment(where.chip.platform, folder, written), timeout_s, python)
        if "error" in answer:
            if answer["while"] == "topology" and "INVALID_ARGUMENT" in answer["error"]:
                said = " ".join(answer["error"].split())[:200]
                raise ValueError(f"plan: the compiler knows no topology {where}; {where.chip.smallest} is one ({said})")
            raise _failure(answer["error"], answer["while"])
        hlo = (folder / "program.hlo").read_text(encoding="utf-8")
        yield Compiled(answer["sizes"], answer["seconds"], hlo, written)


def _environment(platform: str, folder: Path, schedules: Path | None) -> dict[str, str]:
    environment = os.environ | _ENVIRONMENT[platform] | {"JAX_PLATFORMS": "cpu", "JAX_TRACEBACK_FILTERING": "off"}
    environment = {name: value for name, value in environment.items() if name not in _NOT_HANDED_ON}
    environment |= {"JAX_ENABLE_X64": str(jax.config.read("jax_enable_x64")), "TPU_LOG_DIR": str(folder / "logs")}
    if schedules is not None:
        schedules.mkdir()
        # Each of some seventy passes over each instruction otherwise, gigabytes that take as long as compiling.
        read = "|".join(Path(name).stem for name in (BUNDLES, SLOTS, ALLOCATIONS))
        dump = ("dump_llo_text=true", f"dump_to={schedules}", f"dump_llo_pass_label_regex={read}")
        environment["LIBTPU_INIT_ARGS"] = " ".join(f"--xla_jf_{flag}" for flag in dump)
    return environment


def _ask(folder: Path, environment: dict[str, str], timeout_s: float, python: str) -> dict[str, Any]:
    """Runs the child to its end; it never outlives this call, nor this process."""
    with (folder / "stderr").open("w+", encoding="utf-8", errors="replace") as stderr:
        child = None
        try:
            child = subprocess.Popen(
                [python, str(CHILD), str(folder / "request.json")],
                # Held open: the child ends when it is closed, however this process ends.
                stdin=subprocess.PIPE,
                stdout=stderr,
                stderr=stderr,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise CompileFailed(f"not compiled within {timeout_s:g} s (timeout_s)") from None
        finally:
            if child is not None:
                _end(child)
        result = folder / "result.json"
        if result.exists():
            return json.loads(result.read_text(encoding="utf-8"))
        stderr.seek(0)
        lines = [line.strip() for line in stderr if line.strip()]
        how = (
            f"signal {-code}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
            if code < 0
            else f"exit code {code}"
        )
        raise CompileFailed(f"the compiler died, {how}" + (f": {lines[-1][:300]}" if lines else ""))


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(WAIT_AFTER_KILL_S)
    assert child.stdin is not None
    child.stdin.close()


_HBM_MESSAGES = (
    re.compile(r"total memory required for HLO temporaries \(([\d.]+)([KMG])\) exceeds available HBM"),
    re.compile(r"Ran out of memory in memory space hbm\. Used ([\d.]+)([KMG]) of"),
)


def _failure(message: str, during: str) -> CompileFailed:
    """The compiler's message in a line, and the bytes that it wants where it lacks them."""
    for pattern in _HBM_MESSAGES:
        if hbm := pattern.search(message):
            needed = int(float(hbm[1]) * 1024 ** ("KMG".index(hbm[2]) + 1))
            return CompileFailed(OUT_OF_HBM, needed, lasting=True)
    # What else may go wrong, such as a full disk, may go right the next time.
    lasting = during == "compile" and "RESOURCE_EXHAUSTED" in message
    return CompileFailed(" ".join(message.split())[:400], lasting=lasting)
