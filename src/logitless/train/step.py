"""One update of the policy as a pure program: to be audited, measured and planned, without being run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from logitless.train.config import TrainConfig


@dataclass(frozen=True)
class StepProgram:
    """An update.

    Args:
        update: `(trained parameters, other state, optimiser state, batch) -> (the first and third anew, loss, what is
            logged beside it, the gradient's norm)`.
        arguments: shapes of the four arguments of `update`.
        donated: places of those whose memory the results may take: Tunix gives away the optimiser's alone.
    """

    update: Callable[..., Any]
    arguments: tuple[Any, Any, Any, Any]
    donated: tuple[int, ...] = (2,)


def step_program(trainer: Any, batch: Any) -> StepProgram:
    """The update that a Tunix trainer would run.

    Args:
        trainer: a `PeftTrainer`, with the loss it trains with.
        batch: an example of its batches, or their shapes.
    """
    import optax  # pyright: ignore[reportMissingImports] - of the train extra
    from flax import nnx  # pyright: ignore[reportMissingImports] - of the train extra
    from tunix.sft.utils import is_lora_enabled  # pyright: ignore[reportMissingImports] - of the train extra

    kind = nnx.LoRAParam if is_lora_enabled(trainer.model) else nnx.Param
    graph, trained, rest = nnx.split(trainer.model, kind, ...)
    transformation = trainer.optimizer.tx

    def loss(trained: Any, rest: Any, batch: Any) -> Any:
        model = nnx.merge(graph, trained, rest)
        out = trainer.loss_fn(model, **trainer.gen_model_input_fn(batch))
        return out if trainer._has_aux else (out, None)

    def update(trained: Any, rest: Any, optimizer: Any, batch: Any) -> tuple[Any, ...]:
        (value, logged), gradients = jax.value_and_grad(loss, has_aux=True)(trained, rest, batch)
        pure = nnx.to_pure_dict(trained), nnx.to_pure_dict(gradients)
        changes, optimizer = transformation.update(pure[1], optimizer, pure[0])
        anew = jax.tree.map(lambda p, c: p + c.astype(p.dtype), pure[0], changes)
        return anew, optimizer, value, logged, optax.global_norm(pure[1])

    fresh = jax.eval_shape(transformation.init, shapes(nnx.to_pure_dict(trained)))
    return StepProgram(update, (shapes(trained), shapes(rest), fresh, shapes(batch)))


def grpo_batch(config: TrainConfig) -> Any:
    """The shapes of a batch of a run, as Tunix's GRPO learner makes it."""
    from tunix.rl.grpo.grpo_learner import TrainExample  # pyright: ignore[reportMissingImports] - of the train extra

    rollout = config.rollout
    rows = rollout.prompts_per_step * rollout.generations

    def array(length: int | None, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows,) if length is None else (rows, length), dtype)

    prompt, completion = rollout.max_prompt_tokens, rollout.max_new_tokens
    fields = dict(
        prompt_ids=array(prompt, jnp.int32),
        prompt_mask=array(prompt, bool),
        completion_ids=array(completion, jnp.int32),
        completion_mask=array(completion, bool),
        advantages=array(None, jnp.float32),
        ref_per_token_logps=array(completion, jnp.float32) if config.loss.kl_coef else None,
        old_per_token_logps=array(completion, jnp.float32) if rollout.updates_per_rollout > 1 else None,
    )
    return TrainExample(**fields)


def shapes(tree: Any) -> Any:
    """The tree with shapes for arrays, shardings kept."""

    def shape(x: Any) -> Any:
        sharding = x.sharding if isinstance(x, jax.Array | jax.ShapeDtypeStruct) else None
        return jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x), sharding=sharding)

    return jax.tree.map(shape, tree)


def step_memory(program: StepProgram) -> dict[str, int]:
    """Bytes of the compiled update on one device, as its compiler lays them out: exact, nothing is run."""
    compiled = jax.jit(program.update, donate_argnums=program.donated).lower(*program.arguments).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None, "this backend reports no memory of a compiled program"
    return {
        "temp": analysis.temp_size_in_bytes,
        "arguments": analysis.argument_size_in_bytes,
        "outputs": analysis.output_size_in_bytes,
    }
