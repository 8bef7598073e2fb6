"""One arm in a process of its own: `python -m logitless.bench.measure`, driven by JSON lines from `run.py`.

A process either checks (`check`: gradcheck and audit, which need all logits for the oracle) or measures (`prepare`,
`step`, `finish`), never both: the oracle's memory must not count as the arm's.
"""

import os
import platform
import resource
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from logitless.bench.arms import framework_of, logprobs_of, loss_of, peer_of, program_of
from logitless.bench.cases import ARGUMENTS, BASELINE, ArmConfig, Case
from logitless.bench.child import now_ms, serve
from logitless.bench.inputs import as_arrays, device_logprobs, load_arrays, random_arrays

LINUX = sys.platform == "linux"


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    if LINUX:
        return _status_field("VmRSS")
    import psutil

    return psutil.Process().memory_info().rss


def peak_resident_bytes() -> int:
    """The most that `resident_bytes` has been, since `forget_peak` where the system can forget."""
    if LINUX:
        # Not ru_maxrss, which starts at what the parent held when it forked.
        return _status_field("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak() -> None:
    """Starts the peak anew, so that it leaves out compiling and loading; without effect where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _status_field(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def environment(arm: ArmConfig | None = None) -> dict[str, Any]:
    """Device and versions, for the record; of a peer too."""
    import jax

    device = jax.devices()[0]
    peer = None if arm is None else peer_of(arm)
    peers = {} if peer is None else {"peer": {name: version(name) for name in peer.distributions}}
    return {
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "cores": len(os.sched_getaffinity(0)) if LINUX else os.cpu_count(),
        },
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "python": platform.python_version(),
        **peers,
    }


def shape_of(arrays: dict[str, np.ndarray], case: Case) -> dict[str, Any]:
    """What the arrays add to the case in a record."""
    return {
        "hidden_size": arrays["hidden"].shape[-1],
        "vocab_size": arrays["lm_head"].shape[0 if case.layout == "VD" else 1],
        "masked": float(1 - arrays["mask"].mean()),
    }


def check(case: Case, arm: ArmConfig, path: Path) -> dict[str, Any]:
    """Runs gradcheck on the arm, and audit where it is JAX.

    Returns:
        `refused`: why the arm may have no number, or None; `gates`: the record of gradcheck, and whether the audit
        found logits, None without an audit; `shape`; `environment`.
    """
    from logitless.bench.oracle import share_without_gradient

    loaded = load_arrays(path, case)
    shape = shape_of(loaded, case)
    gates, refused = (_check_jax if framework_of(arm) == "jax" else _check_program)(case, arm, loaded)
    shape["no_gradient"] = share_without_gradient(as_arrays(loaded, case.dtype), case)
    return {"refused": refused, "gates": gates, "shape": shape, "environment": environment(arm)}


def _check_jax(case: Case, arm: ArmConfig, loaded: dict[str, np.ndarray]) -> tuple[dict[str, Any], str | None]:
    import jax

    from logitless.audit import audit
    from logitless.gradcheck import gradcheck

    arrays = as_arrays(loaded, case.dtype)
    loss, logprobs = loss_of(arm, case), logprobs_of(arm, case)
    plain = _plain(case, arm)

    def candidate(**given: Any) -> tuple[Any, Any]:
        value = loss(*(given[name] for name in ARGUMENTS))
        if logprobs is None:
            # A loss alone is judged by its value and gradients: the log-probabilities compare equal to themselves.
            return value, jax.lax.stop_gradient(plain(**given)[1])
        return value, logprobs(given["hidden"], given["lm_head"], given["targets"], given["mask"])

    report = gradcheck(
        candidate,
        plain,
        arrays,
        differentiate=case.differentiate,
        oracle_dtype=_oracle_dtype(case),
        block_sizes=arm.block_sizes,
    )
    found = audit(
        loss,
        *(arrays[name] for name in ARGUMENTS),
        vocab_size=shape_of(loaded, case)["vocab_size"],
        num_tokens=case.tokens,
        differentiate=[ARGUMENTS.index(name) for name in case.differentiate],
    )
    refused = None
    if not report.ok:
        refused = f"gradcheck: {report.failures[0]}"
    elif not found.ok and arm.implementation != BASELINE and peer_of(arm) is None:
        refused = f"audit: holds logits ({_first_leak(found)})"
    return _gates(case, arm, report, holds_logits=not found.ok), refused


def _check_program(case: Case, arm: ArmConfig, loaded: dict[str, np.ndarray]) -> tuple[dict[str, Any], str | None]:
    """The same budget and the same oracle for what another framework computed; its memory no audit can read."""
    from logitless.gradcheck import gradcheck_values

    program = program_of(arm, case, loaded)
    values = program.values(program.run())
    del program
    report = gradcheck_values(
        values,
        _plain(case, arm),
        as_arrays(loaded, case.dtype),
        differentiate=case.differentiate,
        oracle_dtype=_oracle_dtype(case),
    )
    refused = None if report.ok else f"gradcheck: {report.failures[0]}"
    return _gates(case, arm, report, holds_logits=None), refused


def _plain(case: Case, arm: ArmConfig) -> Any:
    """What sets the budget, and in a wider dtype the oracle: there, rounding to the inputs' dtype does nothing."""
    from logitless.bench.oracle import plain_loss

    rounds = _rounds_logits(arm)

    def plain(**given: Any) -> tuple[Any, Any]:
        return plain_loss(**given, layout=case.layout, loss=case.loss, softcap=case.softcap, rounds_logits=rounds)

    return plain


def _rounds_logits(arm: ArmConfig) -> bool:
    peer = peer_of(arm)
    return arm.logits_dtype not in (None, "float32") if peer is None else peer.rounds_logits


def _gates(case: Case, arm: ArmConfig, report: Any, *, holds_logits: bool | None) -> dict[str, Any]:
    rounds = _rounds_logits(arm) and case.dtype != "float32"
    record = report.record()
    if framework_of(arm) != "jax" or logprobs_of(arm, case) is None:
        # Those of plain jnp stood in: nothing was checked, and so nothing is recorded.
        record = {key: value for key, value in record.items() if "logp_max_abs" not in key}
    return {"gradcheck": record, "holds_logits": holds_logits, "rounds_logits": rounds}


def _oracle_dtype(case: Case) -> str:
    """A TPU has no float64, and 80 GB do not hold the float64 logits of the largest sizes that need a GPU."""
    import jax

    return "float32" if jax.default_backend() == "tpu" or case.device != "any" else "float64"


def _first_leak(found: Any) -> str:
    leak = [*found.materialised, *found.traced][0]
    # The file's name alone: records name no folders of the machine.
    return f"{leak.dtype}{list(leak.shape)} made by {leak.primitive} at {Path(leak.source).name}"


def loss_and_gradients(loss: Any, case: Case) -> Any:
    import jax

    return jax.value_and_grad(loss, argnums=tuple(ARGUMENTS.index(name) for name in case.differentiate))


class JaxArm:
    """The arm's compiled program and its inputs, ready to be timed."""

    def __init__(self, case: Case, arm: ArmConfig, path: Path) -> None:
        import jax

        arrays = load_arrays(path, case)
        on_device = as_arrays(arrays, case.dtype)
        self._inputs = jax.block_until_ready([on_device[name] for name in ARGUMENTS])
        del arrays, on_device
        self._program = jax.jit(loss_and_gradients(loss_of(arm, case), case)).lower(*self._inputs).compile()
        memory = self._program.memory_analysis()
        self.temp_bytes = None if memory is None else int(memory.temp_size_in_bytes)
        self.baseline_bytes = resident_bytes()
        forget_peak()
        # The first run pays for pages and thread pools that later runs find ready.
        self.loss = float(np.asarray(self._program(*self._inputs)[0]))

    def step(self) -> float:
        """Milliseconds of one loss with its gradients."""
        import jax

        start = now_ms()
        jax.block_until_ready(self._program(*self._inputs))
        return now_ms() - start

    def device_peak_bytes(self) -> int | None:
        import jax

        stats = jax.devices()[0].memory_stats()
        return None if stats is None else stats.get("peak_bytes_in_use")


class ProgramArm:
    """The same of another framework, in a process without JAX."""

    temp_bytes = None

    def __init__(self, case: Case, arm: ArmConfig, path: Path) -> None:
        self._program = program_of(arm, case, load_arrays(path, case))
        self.baseline_bytes = resident_bytes()
        forget_peak()
        self.loss = self._program.loss(self._program.run())
        self.step, self.device_peak_bytes = self._program.step, self._program.device_peak_bytes


def make_inputs(message: dict[str, Any]) -> dict[str, Any]:
    """Random inputs whose log-probabilities need the device."""
    from logitless.bench.hidden_states import write_npz

    write_npz(Path(message["arrays"]), random_arrays(**message["sizes"], logprobs_of=device_logprobs))
    return {}


def main() -> None:
    """Answers `run.py`."""
    arms: list[JaxArm | ProgramArm] = []

    def handle(message: dict[str, Any]) -> dict[str, Any]:
        match message["do"]:
            case "environment":
                return environment()
            case "inputs":
                return make_inputs(message)
            case "step":
                return {"time_ms": arms[0].step()}
            case "finish":
                return {"peak_bytes": peak_resident_bytes(), "device_peak_bytes": arms[0].device_peak_bytes()}
        case, arm, path = Case(**message["case"]), ArmConfig(**message["arm"]), Path(message["arrays"])
        if message["do"] == "check":
            return check(case, arm, path)
        arms.append((JaxArm if framework_of(arm) == "jax" else ProgramArm)(case, arm, path))
        ready = arms[0]
        numbers = {"temp_bytes": ready.temp_bytes, "baseline_bytes": ready.baseline_bytes, "loss": ready.loss}
        return {"numbers": numbers}

    serve(handle)


if __name__ == "__main__":
    main()
