"""What an adapter asks of a model that carries its mesh."""

from typing import Any


def require_sharding(mesh: Any, sharding: Any, *, asked_by: str) -> None:
    """Raises ValueError where a mesh has several devices and nothing says how tokens and head lie over them."""
    if sharding is None and mesh.size > 1:
        raise ValueError(
            f"{asked_by}: the model's mesh has {mesh.size} devices ({dict(mesh.shape)}) and sharding is None; give "
            "sharding=HeadSharding(model.mesh, tokens=..., vocab=...), the axes that split tokens and vocabulary"
        )
