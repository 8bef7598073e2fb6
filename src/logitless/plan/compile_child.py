"""Compiles one exported program for a device that is not here, in a process of its own.

`python compile_child.py REQUEST.json`. It imports nothing but JAX, so that it runs in any environment that has the
compiler: the parent gives the interpreter, the variables and the limits.
"""

import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    """Writes `result.json` and `program.hlo` beside the request; an error that the compiler raises is a result too."""
    folder = Path(path).parent
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    request = json.loads(Path(path).read_text(encoding="utf-8"))
    result = _compile(request, folder)
    partial = folder / "result.part"
    partial.write_text(json.dumps(result), encoding="utf-8")
    os.replace(partial, folder / "result.json")
    # At once: the compiler's own threads need no farewell.
    os._exit(0)


def _compile(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, SingleDeviceSharding

    refusals = (RuntimeError, ValueError, NotImplementedError, AssertionError)
    options = {"target_config": request["target_config"], "topology": "1x1x1"} if request["target_config"] else {}
    try:
        topology = topologies.get_topology_desc(
            platform=request["platform"], topology_name=request["topology"], **options
        )
        exported = jax.export.deserialize(bytearray((folder / "program.bin").read_bytes()))
        if request["mesh"] is None:
            shardings: Any = [SingleDeviceSharding(topology.devices[0])] * len(exported.in_avals)
        else:
            names, sizes, types = zip(*request["mesh"], strict=True)
            devices = np.array(topology.devices[: exported.nr_devices]).reshape(sizes)
            mesh = Mesh(devices, names, axis_types=tuple(AxisType[name] for name in types))
            shardings = exported.in_shardings_jax(mesh)
    except refusals as error:
        return {"error": f"{type(error).__name__}: {error}", "while": "topology"}
    kept = exported.module_kept_var_idx
    avals = [
        jax.ShapeDtypeStruct(exported.in_avals[i].shape, exported.in_avals[i].dtype, sharding=shardings[i])
        for i in kept
    ]
    donated = tuple(place for place, i in enumerate(kept) if i in request["donate"])

    def program(*given: Any) -> Any:
        # What the function does not use is no argument of the program, as with jax.jit.
        flat = [jax.numpy.zeros(aval.shape, aval.dtype) for aval in exported.in_avals]
        for i, value in zip(kept, given, strict=True):
            flat[i] = value
        return exported.call(*flat)

    start = time.perf_counter()
    try:
        compiled = jax.jit(program, donate_argnums=donated).lower(*avals).compile()
    except refusals as error:
        return {"error": str(error), "while": "compile"}
    memory = compiled.memory_analysis()
    names = ("temp", "argument", "output", "alias")
    sizes = {name: int(getattr(memory, f"{name}_size_in_bytes")) for name in names}
    (folder / "program.hlo").write_text(compiled.as_text() or "", encoding="utf-8")
    return {"sizes": sizes, "seconds": time.perf_counter() - start}


def _end_with_parent(folder: Path) -> None:
    """Ends this process when the parent has closed its pipe, in mid-compilation too, and takes its files along."""
    os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
