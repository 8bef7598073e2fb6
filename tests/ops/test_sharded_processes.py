"""A mesh over two processes: the numbers of one device in one process, and an end in bounded time where one is lost."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharded_worker import COLUMNS, JOBS, LAST_STEP, LOST_SECONDS, PROCESSES, VOCAB, found_compiled

from problems import assert_in_budget, peaked

slow = pytest.mark.slow
WORKER = Path(__file__).with_name("sharded_worker.py")
BUSY_SECONDS = 400
"""For the processes to start, compile and compute where few cores have much to do."""


def problem(folder: Path) -> dict[str, np.ndarray]:
    """Of four sequences, also left in the folder for the processes."""
    b, t, width = 4, 10, 24
    p, rng = peaked(b * t, width, VOCAB, "float32"), np.random.default_rng(1)
    logprobs = jax.nn.log_softmax(p.hidden @ p.lm_head.T + p.bias[None])
    near = np.asarray(jnp.take_along_axis(logprobs, p.targets[:, None], 1)).reshape(b, t)
    given = {
        "hidden": p.hidden.reshape(b, t, width),
        "lm_head": p.lm_head,
        "bias": p.bias,
        "targets": p.targets.reshape(b, t),
        "mask": p.mask.reshape(b, t),
        "old_logprobs": near + rng.normal(size=(b, t)) / 4,
        "ref_logprobs": near + rng.normal(size=(b, t)) / 4,
        "advantages": rng.normal(size=b),
        "weights": rng.normal(size=(b, t)),
    }
    given = {name: np.asarray(x, np.float32 if x.dtype.kind == "f" else x.dtype) for name, x in given.items()}
    np.savez(folder / "problem.npz", **given)
    return given


def by_name(found: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(found)}


def on_one_device(given: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """By plain jnp, in float32 and in float64."""
    plain = by_name(found_compiled({name: jnp.asarray(x) for name, x in given.items()}, "reference", None))
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(x, np.float64 if x.dtype.kind == "f" else x.dtype) for name, x in given.items()}
        return plain, by_name(found_compiled(wide, "reference", None))


def put_together(folder: Path, layout: str) -> dict[str, np.ndarray]:
    """Whole arrays from the parts that the processes have left; where several devices have a part, it is one."""
    found: dict[str, np.ndarray] = {}
    filled: dict[str, np.ndarray] = {}
    for i in range(PROCESSES):
        with np.load(folder / f"{layout} {i}.npz") as stored:
            for key, part in stored.items():
                name, device, start, shape = json.loads(key)
                whole = found.setdefault(name, np.empty(shape, part.dtype))
                seen = filled.setdefault(name, np.zeros(shape, bool))
                place = tuple(slice(first, first + size) for first, size in zip(start, part.shape, strict=True))
                if seen[place].any():
                    np.testing.assert_array_equal(part, whole[place], err_msg=f"{name} on device {device}")
                whole[place], seen[place] = part, True
    assert all(seen.all() for seen in filled.values())
    return found


class Run:
    """Two processes, and what they write."""

    def __init__(self, folder: Path, processes: list[subprocess.Popen]) -> None:
        self.folder, self.processes = folder, processes

    def output(self, i: int, name: str) -> str:
        return (self.folder / f"{name} {i}").read_text(errors="replace")

    def wait_for(self, i: int, words: str) -> None:
        end = time.monotonic() + BUSY_SECONDS
        while words not in self.output(i, "stdout"):
            assert self.processes[i].poll() is None, f"process {i} has ended: {self.output(i, 'stderr')[-3000:]}"
            assert time.monotonic() < end, f"process {i} does not say {words!r}: {self.output(i, 'stderr')[-3000:]}"
            time.sleep(0.01)

    def wait(self, i: int, seconds: float) -> int:
        try:
            return self.processes[i].wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"process {i} still runs after {seconds:g} s: {self.output(i, 'stderr')[-3000:]}")


@contextlib.contextmanager
def two_processes(folder: Path, job: str) -> Iterator[Run]:
    """On a port of the loopback; neither outlives the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A device that waits for another on a busy machine must not end its process.
    flags = f"--xla_cpu_collective_call_terminate_timeout_seconds={BUSY_SECONDS}"
    foreign = re.compile("JAX_.*|XLA_.*|.*_proxy", re.IGNORECASE)
    environment = {name: x for name, x in os.environ.items() if not foreign.fullmatch(name)}
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    processes: list[subprocess.Popen] = []
    with contextlib.ExitStack() as files:
        try:
            for i in range(PROCESSES):
                out, err = (files.enter_context((folder / f"{name} {i}").open("wb")) for name in ("stdout", "stderr"))
                command = [sys.executable, str(WORKER), job, str(i), str(port), str(folder)]
                processes.append(
                    subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True)
                )
            yield Run(folder, processes)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            for process in processes:
                process.wait(20)


@slow
@pytest.mark.parametrize("job", JOBS)
def test_two_processes_find_what_one_device_finds(job, tmp_path):
    given = problem(tmp_path)
    with two_processes(tmp_path, job) as run:
        plain, oracle = on_one_device(given)
        for i in range(PROCESSES):
            assert run.wait(i, BUSY_SECONDS) == 0, f"process {i}: {run.output(i, 'stderr')[-3000:]}"
    for layout in JOBS[job]:
        found = put_together(tmp_path, layout)
        assert found.keys() == plain.keys()
        for name, ours in found.items():
            if ours.shape != plain[name].shape:
                assert ours.shape[0] == COLUMNS
                ours, padding = np.split(ours, [VOCAB])
                assert not padding.any(), f"{layout}: {name}: a gradient of padding"
            assert ours.dtype == plain[name].dtype
            # A number is a sum over tokens, with what a rounding of each log-probability, of 20 and more, does to it.
            assert_in_budget(f"{layout}: {name}", ours, plain[name], oracle[name], ulps=8 if ours.ndim else 64)


LOSSES = {
    "a process is killed": (1, signal.SIGKILL),
    "the coordinator is killed": (0, signal.SIGKILL),
    # As a host without power or network: no connection is closed.
    "a process falls silent": (1, signal.SIGSTOP),
    "the coordinator falls silent": (0, signal.SIGSTOP),
}


@slow
@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_process_ends_the_other_in_bounded_time(loss, tmp_path):
    """By `heartbeat_timeout_seconds` of `jax.distributed.initialize`, whose default is 100 s."""
    lost, how = LOSSES[loss]
    problem(tmp_path)
    with two_processes(tmp_path, "steps") as run:
        for i in range(PROCESSES):
            run.wait_for(i, f"in step {LAST_STEP}\n")
        os.killpg(run.processes[lost].pid, how)
        assert_ends(run, 1 - lost)


@slow
def test_a_process_that_ends_by_an_error_ends_the_other_in_bounded_time(tmp_path):
    """By `shutdown_timeout_seconds`, whose default is 300 s: at its end it waits for the other, and is no lost one."""
    problem(tmp_path)
    with two_processes(tmp_path, "raises") as run:
        run.wait_for(0, f"in step {LAST_STEP}\n")
        assert_ends(run, 0)
        assert run.wait(1, LOST_SECONDS) != 0
        assert "this process ends by an error of its own" in run.output(1, "stderr")


def assert_ends(run: Run, i: int) -> None:
    start = time.monotonic()
    status = run.wait(i, LOST_SECONDS + 20)
    print(f"process {i} ended with status {status} after {time.monotonic() - start:.1f} s")
    assert status != 0
    assert "Terminating process because the JAX distributed service detected fatal errors" in run.output(i, "stderr")
