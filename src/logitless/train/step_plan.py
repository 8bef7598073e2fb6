"""`logitless ab plan`: the update of each arm on a TPU that is not here, by the TPU's own compiler."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from logitless.bench.records import append_records, commit_of_package, results_folder
from logitless.plan import plan_function
from logitless.train.ab_config import AbConfig
from logitless.train.ab_report import planned, planned_words
from logitless.train.config import TinyModel, TrainConfig
from logitless.train.errors import TrainError
from logitless.train.loss import grpo_config, install_loss
from logitless.train.models import qwen2_config, sizes_of_tiny
from logitless.train.run import require_tunix
from logitless.train.step import StepProgram, grpo_batch, step_program

PAD, END = 151_643, 151_645
"""Qwen2.5's ids of padding and end; their values change nothing in a compiled update."""


def run_plan_ab(config: AbConfig) -> int:
    """Compiles the update of each arm for `config.topology`, prints memory and records it; nothing is run.

    Returns:
        0 where every arm compiles and fits, else 1.

    Raises:
        TrainError: no topology in the config, a model whose sizes are not known without its files.
    """
    require_tunix("logitless ab plan")
    if config.topology is None:
        raise TrainError("ab plan: the config names no topology, such as v6e:2x4")
    results = results_folder(config.results)
    head = {
        "name": f"{config.name}_plan",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **commit_of_package(),
    }
    records = []
    path = results / f"{config.name}_plan.jsonl"
    for arm in config.arms:
        print(f"arm {arm.title}: compiling one update for {config.topology}, which may take minutes", flush=True)
        train = replace(config.train, loss=arm)
        program = abstract_program(train)
        with constraints_of_a_tpu(abstract_mesh(train)):
            plan = plan_function(
                program.update,
                program.arguments,
                config.topology,
                donate_argnums=program.donated,
                timeout_s=config.timeout_s,
                schedules=False,
            )
        record = head | {"topology": config.topology, "arm": arm.title, "executed": False, "train": asdict(train)}
        records.append(record | {"plan": {name: getattr(plan, name) for name in RECORDED}})
        append_records(path, records[-1:])
    print_plans(records)
    return 0 if all(record["plan"]["fits"] for record in records) else 1


RECORDED = (
    "fits",
    "reason",
    "temp_bytes",
    "argument_bytes",
    "output_bytes",
    "total_bytes",
    "hbm_bytes",
    "collective_bytes",
    "expected_ms",
)


def print_plans(records: list[dict[str, Any]]) -> None:
    """The table of a plan."""
    from rich.console import Console
    from rich.table import Table

    header, *rows = planned(records)
    table = Table(*header, title=records[0]["name"], caption=planned_words(records))
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, width=160).print(table)


def abstract_mesh(config: TrainConfig) -> AbstractMesh:
    """The mesh of a run without its devices."""
    sizes = config.mesh.get("fsdp", 1), config.mesh.get("tp", 1)
    return AbstractMesh(sizes, ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)


def abstract_program(config: TrainConfig) -> StepProgram:
    """The update of a run without weights or devices: shapes alone, laid out as Tunix lays them out."""
    import optax  # pyright: ignore[reportMissingImports] - of the train extra
    from flax import nnx  # pyright: ignore[reportMissingImports] - of the train extra
    from tunix.models.qwen2.model import Qwen2  # pyright: ignore[reportMissingImports] - of the train extra

    from logitless.train.session import make_optimizer

    mesh = abstract_mesh(config)
    sizes = qwen2_config(config.model, sizes_of(config))
    model = nnx.eval_shape(lambda: Qwen2(sizes, rngs=nnx.Rngs(0)))
    trainer = _trainer(config, model, make_optimizer(config.optimizer, config.steps), mesh)
    program = step_program(trainer, grpo_batch(config))
    trained, rest, optimizer, batch = program.arguments
    specs = nnx.get_partition_spec(trained)

    def laid(x: Any, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    weights = jax.tree.map(lambda x, spec: laid(x, spec), trained, specs)
    moments = optax.tree_map_params(
        trainer.optimizer.tx,
        laid,
        optimizer,
        jax.tree.map(lambda x: x.sharding.spec, nnx.to_pure_dict(weights)),
        transform_non_params=lambda x: laid(x, P()),
    )
    rows = jax.tree.map(lambda x: laid(x, P("fsdp")), batch)
    others = jax.tree.map(lambda x: laid(x, P()), rest)
    return StepProgram(program.update, (weights, others, moments, rows))


def sizes_of(config: TrainConfig) -> dict[str, Any]:
    """The sizes of a model that need no file.

    Raises:
        TrainError: another model than tiny ones and Qwen2.5.
    """
    if config.model.source == "tiny":
        return sizes_of_tiny(config.model.tiny)
    from tunix.models.qwen2.model import ModelConfig as Qwen2Config  # pyright: ignore[reportMissingImports]

    found = re.fullmatch(r"Qwen/Qwen2\.5-(0\.5|1\.5|3|7)B(-Instruct)?", config.model.source)
    if found is None:
        raise TrainError(
            f"ab plan: model.source={config.model.source}: its sizes are not known without its files; known are tiny "
            "and Qwen/Qwen2.5-0.5B, -1.5B, -3B and -7B"
        )
    known = getattr(Qwen2Config, f"qwen2p5_{found[1].replace('.', 'p')}b")()
    return {name: getattr(known, name) for name in sizes_of_tiny(TinyModel())}


def _trainer(config: TrainConfig, model: Any, transformation: Any, mesh: AbstractMesh) -> Any:
    """What `step_program` reads of a trainer, with Tunix's loss or ours in it."""
    from tunix.rl import algo_core  # pyright: ignore[reportMissingImports] - of the train extra

    options = grpo_config(config)
    options.temperature = config.rollout.temperature

    class Trainer(SimpleNamespace):
        def with_loss_fn(self, loss: Any, has_aux: bool) -> None:
            self.loss_fn, self._has_aux = loss, has_aux

        def with_rl_metrics_to_log(self, metrics: Any) -> None:
            self.rl_metrics_to_log = metrics

    trainer = Trainer(
        model=model,
        optimizer=SimpleNamespace(tx=transformation),
        gen_model_input_fn=lambda batch: {"train_example": batch, "algo_config": options},
        rl_metrics_to_log={"kl": max},
    )
    stock = partial(algo_core.grpo_loss_fn, pad_id=PAD, eos_id=END)
    trainer.with_loss_fn(lambda model, train_example, algo_config: stock(model, train_example, algo_config), True)
    rollout = SimpleNamespace(pad_id=lambda: PAD, eos_id=lambda: END)
    cluster = SimpleNamespace(actor_trainer=trainer, rollout=rollout, inference_worker=SimpleNamespace())
    install_loss(SimpleNamespace(rl_cluster=cluster, algo_config=options), config.loss, mesh)
    return trainer


@contextmanager
def constraints_of_a_tpu(mesh: AbstractMesh) -> Iterator[None]:
    """Tunix's Qwen2 with the layouts of its activations, which it leaves out where the first device is a CPU."""
    from tunix.models.qwen2 import model as module  # pyright: ignore[reportMissingImports] - of the train extra

    def constrained(x: jax.Array, axes: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))

    before = module.shard
    module.shard = constrained
    try:
        yield
    finally:
        module.shard = before
