"""One of two processes that share a mesh of CPUs: `sharded_worker.py JOB PROCESS PORT FOLDER`.

`test_sharded_processes.py` starts them. Each reads the problem from the folder, and leaves there the parts of what it
found that lie on its own devices.
"""

import itertools
import json
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from logitless import HeadSharding, linear_grpo_loss, linear_logprobs, linear_token_stats
from logitless.ops import sharded_device

PROCESSES = 2
LOST_SECONDS = 10
"""After which a process is given up that is silent, or for which another waits at its end."""
LAST_STEP = 20
FUNCTIONS = ("linear_logprobs", "linear_token_stats", "linear_grpo_loss")
VOCAB, COLUMNS = 701, 704
# The first axis of the mesh goes over the processes, the second stays within each.
LAYOUTS: dict[str, dict[str, Any]] = {
    "gather_head": {"tokens": "fsdp", "vocab": ("tensor", "fsdp"), "head": "gather_head"},
    "gather_tokens": {"tokens": "fsdp", "vocab": ("tensor", "fsdp"), "head": "gather_tokens"},
    "data over processes x tensor": {"tokens": "fsdp", "vocab": "tensor"},
    "data x tensor over processes": {"tokens": "tensor", "vocab": "fsdp"},
    "tokens over all": {"tokens": P("fsdp", "tensor"), "vocab": ()},
    "a whole head on every device": {"tokens": "fsdp", "vocab": ("tensor", "fsdp"), "head": "gather_head"},
}
JOBS = {
    "compiled": ("gather_head", "gather_tokens", "data over processes x tensor", "data x tensor over processes"),
    "eager": ("gather_tokens", "tokens over all", "a whole head on every device"),
}


def found_by(
    arrays: dict[str, Any], implementation: str, sharding: HeadSharding | None, names: Iterable[str] = FUNCTIONS
) -> dict[str, Any]:
    """Values and all gradients of public functions."""
    targets, mask, weights = arrays["targets"], arrays["mask"], arrays["weights"]
    how: dict[str, Any] = {"layout": "VD", "implementation": implementation, "sharding": sharding}

    def logprobs(hidden, lm_head, bias):
        options: dict[str, Any] = {"temperature": 0.7, "softcap": 20.0, **how}
        found = linear_logprobs(hidden, lm_head, targets, bias=bias, mask=mask, **options)
        return jnp.sum(weights * found), found

    def stats(hidden, lm_head, bias):
        outputs = "logprobs", "lse", "entropy", "mean_logits"
        found = linear_token_stats(hidden, lm_head, targets, bias=bias, mask=mask, outputs=outputs, **how)
        return jnp.sum(weights * (found.logprobs + 0.1 * found.lse + found.entropy - found.mean_logits)), found

    def grpo(hidden, lm_head, bias):
        of_tokens = targets, arrays["old_logprobs"], arrays["advantages"], mask
        own: dict[str, Any] = {"bias": bias, "kl_coef": 0.04, "ref_logprobs": arrays["ref_logprobs"]}
        return linear_grpo_loss(hidden, lm_head, *of_tokens, **own, **how)

    known = {"linear_logprobs": logprobs, "linear_token_stats": stats, "linear_grpo_loss": grpo}
    heads = tuple(arrays[name] for name in ("hidden", "lm_head", "bias"))
    return {name: jax.value_and_grad(known[name], (0, 1, 2), has_aux=True)(*heads) for name in names}


found_compiled = jax.jit(found_by, static_argnames=("implementation", "sharding", "names"))


def placed(problem: dict[str, np.ndarray], layout: str) -> tuple[dict[str, jax.Array], HeadSharding]:
    """Arrays of all devices, of which a process makes its own parts."""
    grid = np.array(jax.devices()).reshape(PROCESSES, -1)
    mesh = Mesh(grid, ("fsdp", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))
    whole = layout.startswith("a whole head")
    sharding = HeadSharding(mesh, vocab_size=None if whole else VOCAB, **LAYOUTS[layout])
    rows = sharding.of_rows()
    specs = dict.fromkeys(problem, rows) | {
        "hidden": sharding.of_rows(ndim=2),
        "lm_head": P() if whole else sharding.head_spec("VD"),
        "bias": P() if whole else sharding.bias_spec,
        "advantages": P(rows[0]),
    }
    given = dict(problem)
    if not whole:
        for name in ("lm_head", "bias"):
            # Columns of rubbish behind the true vocabulary.
            more = [(0, COLUMNS - VOCAB)] + [(0, 0)] * (given[name].ndim - 1)
            given[name] = np.pad(given[name], more, constant_values=np.nan)
    arrays: dict[str, jax.Array] = {
        name: jax.make_array_from_callback(x.shape, NamedSharding(mesh, specs[name]), lambda at, x=x: x[at])
        for name, x in given.items()
    }
    return arrays, sharding


def leave(path: Path, found: Any) -> None:
    """Every part on a device of this process, with the place where it starts and the shape of the whole."""
    parts = {}
    for name, x in jax.tree_util.tree_leaves_with_path(found):
        for shard in x.addressable_shards:
            start = [at.start or 0 for at in shard.index]
            parts[json.dumps([jax.tree_util.keystr(name), shard.device.id, start, x.shape])] = np.asarray(shard.data)
    np.savez(path, **parts)


def main(job: str, process: int, port: str, folder: Path) -> None:
    # Should whoever started this die: nothing stays behind.
    signal.alarm(600)
    # Of eager programs with sums several are on their way, in which JAX 0.10.2 hangs: let each end before the next.
    eager = job == "eager"
    jax.config.update("jax_cpu_enable_async_dispatch", not eager)
    jax.config.update("jax_num_cpu_devices", 1 if eager else 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    address, patience = f"127.0.0.1:{port}", 120 if job in JOBS else LOST_SECONDS
    jax.distributed.initialize(
        address,
        PROCESSES,
        process,
        cluster_detection_method="deactivate",
        coordinator_bind_address=address,
        initialization_timeout=120,
        heartbeat_timeout_seconds=patience,
        shutdown_timeout_seconds=patience,
    )
    # Several pieces of head and tokens, gathered one ahead of the one at work.
    sharded_device.GATHERED_BYTES = 2**11
    with np.load(folder / "problem.npz") as stored:
        problem = dict(stored)
    for layout in JOBS.get(job, ()):
        arrays, sharding = placed(problem, layout)
        assert not any(x.is_fully_addressable for x in arrays.values())
        found = (found_by if eager else found_compiled)(arrays, "auto", sharding)
        leave(folder / f"{layout} {process}.npz", found)
    if job in JOBS:
        return
    arrays, sharding = placed(problem, "gather_head")
    for step in itertools.count():
        jax.block_until_ready(found_compiled(arrays, "auto", sharding, names=FUNCTIONS[-1:]))
        print("in step", step, flush=True)
        if job == "raises" and process == 1 and step == LAST_STEP:
            raise RuntimeError("this process ends by an error of its own")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
