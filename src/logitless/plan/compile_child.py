"""Compiles one exported program for a device that is not here, in a process of its own.

`python compile_child.py REQUEST.json`. It imports nothing but JAX, so that it runs in any environment that has the
compiler: the parent gives the interpreter, the variables and the limits.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    """Writes `result.json` and `program.hlo` beside the request; an error that the compiler raises is a result too."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    folder = Path(path).parent
    request = json.loads(Path(path).read_text(encoding="utf-8"))
    result = _compile(request, folder)
    partial = folder / "result.part"
    partial.write_text(json.dumps(result), encoding="utf-8")
    os.replace(partial, folder / "result.json")


def _compile(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    import jax
    from jax.experimental import topologies

    result: dict[str, Any] = {}
    options = {"target_config": request["target_config"], "topology": "1x1x1"} if request["target_config"] else {}
    try:
        topology = topologies.get_topology_desc(
            platform=request["platform"], topology_name=request["topology"], **options
        )
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return result | {"error": str(error), "while": "topology"}
    result |= {"devices": len(topology.devices), "device_kind": topology.devices[0].device_kind}
    exported = jax.export.deserialize(bytearray((folder / "program.bin").read_bytes()))
    if request["mesh"] is None:
        shardings: Any = [jax.sharding.SingleDeviceSharding(topology.devices[0])] * len(exported.in_avals)
    else:
        names, sizes = zip(*request["mesh"], strict=True)
        shardings = exported.in_shardings_jax(topologies.make_mesh(topology, sizes, names))
    pairs = zip(exported.in_avals, shardings, strict=True)
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding) for aval, sharding in pairs]

    def program(*flat: Any) -> Any:
        arguments, keywords = jax.tree.unflatten(exported.in_tree, flat)
        return exported.call(*arguments, **keywords)

    start = time.perf_counter()
    try:
        compiled = jax.jit(program, donate_argnums=tuple(request["donate"])).lower(*avals).compile()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return result | {"error": str(error), "while": "compile", "seconds": time.perf_counter() - start}
    memory = compiled.memory_analysis()
    names = ("temp", "argument", "output", "alias", "generated_code")
    sizes = {name: int(getattr(memory, f"{name}_size_in_bytes")) for name in names}
    (folder / "program.hlo").write_text(compiled.as_text() or "", encoding="utf-8")
    return result | {"sizes": sizes, "seconds": time.perf_counter() - start}


def _end_with_parent() -> None:
    """Ends this process when the parent has closed its pipe, in mid-compilation too."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
