"""A run on Tunix: the cluster, the learner, the checkpoints, and what happens at each update."""

import json
import resource
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax  # pyright: ignore[reportMissingImports] - of the train extra
import orbax.checkpoint as ocp  # pyright: ignore[reportMissingImports] - of the train extra
from flax import nnx  # pyright: ignore[reportMissingImports] - of the train extra
from tunix.rl import rl_cluster as tunix  # pyright: ignore[reportMissingImports] - of the train extra
from tunix.rl.grpo.grpo_learner import GRPOLearner  # pyright: ignore[reportMissingImports]
from tunix.rl.rollout.base_rollout import RolloutConfig  # pyright: ignore[reportMissingImports]
from tunix.sft.utils import is_lora_enabled  # pyright: ignore[reportMissingImports] - of the train extra

from logitless._files import replace_file
from logitless.bench.records import commit_of_package
from logitless.train.config import OptimizerConfig, TrainConfig
from logitless.train.data import Problems
from logitless.train.errors import TrainError
from logitless.train.loss import grpo_config, install_loss
from logitless.train.models import SUM_QUESTION, Policy, add_lora, load_policy
from logitless.train.progress import Progress
from logitless.train.rewards import REWARDS
from logitless.train.rollout import StepRollout
from logitless.train.sinks import open_sinks
from logitless.train.step import grpo_batch, step_memory, step_program
from logitless.train.warm_start import warm_start

FREE_FACTOR = 1.2
"""Free bytes that a checkpoint must find, times its own size: it is written beside the last one."""


class Session:
    """A run that can be stopped and resumed.

    Args:
        config: the run.
        folder: its folder.

    Use it as a context: leaving it closes checkpoints and sinks. `stopped` is True after Ctrl-C.
    """

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self.config, self.folder, self.stopped = config, folder, False
        self.commits: list[dict[str, Any]] = []
        self.mesh = make_mesh(config.mesh)
        self.progress = Progress(config.name, config.steps)
        with ExitStack() as undo:
            # Nobody leaves a context that was never entered.
            undo.callback(self.progress.close)
            self._prepare()
            undo.pop_all()

    def _prepare(self) -> None:
        config, folder = self.config, self.folder
        policy = load_policy(config.model, config.seed, self.mesh)
        self.problems = Problems(config.data, config.seed)
        self.template = template_of(config, policy)
        if config.warm_start is not None:
            policy = warm_start(config, config.warm_start, policy, self.problems, self.template, self.mesh, folder)
        self.policy = policy
        self.learner = self._learner()
        self.trainer = self.learner.rl_cluster.actor_trainer
        self._resumed_at = self.trainer.train_steps
        if self._resumed_at:
            self.progress.say(f"resuming at update {self._resumed_at}")
        keep = {"keep_until": self._resumed_at, "say": self.progress.say}
        self.sinks = open_sinks(config.log, config.name, folder, json.loads(json.dumps(asdict(config))), **keep)
        self._seconds: deque[float] = deque(maxlen=10)
        self._began = time.perf_counter()
        self._rewards: list[float] = []
        self._memory: dict[str, int] | None = None
        self.trainer.with_training_hooks(_Hooks(self))
        self.trainer.checkpoint_manager = _Checkpoints(self, self.trainer.checkpoint_manager)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        for sink in self.sinks:
            sink.close()
        self.progress.close()

    def train(self) -> None:
        """Trains to the last update, or until Ctrl-C, after which the batch at hand is finished and kept."""
        if self._resumed_at >= self.config.steps:
            self.progress.say(f"all {self.config.steps} updates are done already")
            return
        self.commits = commits_of_run(self.folder)
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            self.learner.train(self._batches())
        except _Stop:
            self.stopped = True
            self.progress.say(f"stopped at update {self.trainer.train_steps}, which is kept; run again to go on")
        finally:
            signal.signal(signal.SIGINT, before)
            self.trainer.checkpoint_manager.close()

    def updated(self, step: int) -> None:
        """Writes the numbers of an update; called before its checkpoint."""
        buffered = self.trainer._prev_buffered_train_metrics
        numbers = {
            name: float(np.mean(np.asarray(values))) for name, (values, _) in buffered.additional_metrics.items()
        }
        loss = float(buffered.loss)
        if not np.isfinite(loss):
            self.progress.say(f"update {step}: the loss is {loss}")
        self._seconds.append(time.perf_counter() - self._began)
        if self._memory is None:
            self._memory = self._step_memory()
        line = {
            "loss": loss,
            "reward/mean": float(np.mean(self._rewards)),
            "kl": numbers.get("kl"),
            "entropy": numbers.get("entropy"),
            "grad_norm": numbers.get("grad_norm"),
            "clip_fraction": numbers.get("pg_clipfrac"),
            "time/train/step_s": self._seconds[-1],
            "time/train/step_avg_last10_s": float(np.mean(self._seconds)),
            "mem/step_temp_bytes": self._memory["temp"],
            "mem/peak_bytes_in_use_max": device_peak_bytes(),
            "mem/process_peak_resident_bytes": process_peak_bytes(),
        }
        for sink in self.sinks:
            sink.write(step, line)
        self.progress.show(step, line)

    def summary(self) -> dict[str, Any]:
        """What `summary.json` says: the compiled step and where it ran."""
        device = jax.devices()[0]
        return {
            "name": self.config.name,
            "commits": self.commits,
            "loss": asdict(self.config.loss) | {"title": self.config.loss.title},
            "memory": self._memory,
            "tokens_per_step": self.config.tokens_per_step,
            "vocab_size": self.policy.vocab_size,
            "device": getattr(device, "device_kind", device.platform),
            "jax": jax.__version__,
            "python": sys.version.split()[0],
        }

    def _step_memory(self) -> dict[str, int]:
        with self.mesh:
            memory = step_memory(step_program(self.trainer, grpo_batch(self.config)))
        self._memory = memory
        replace_file(self.folder / "summary.json", json.dumps(self.summary(), indent=1).encode())
        return memory

    def _interrupt(self, *_: object) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True
        self.progress.say("Ctrl-C: finishing this batch; once more ends at once, without a checkpoint")

    def _rollout_step(self) -> int:
        return self.trainer.train_steps // self.config.rollout.updates_per_rollout

    def _batches(self) -> Iterator[dict[str, np.ndarray]]:
        """Batches from the update at which the run resumes; those before it are what Tunix itself skips."""
        size = self.config.rollout.prompts_per_step

        def batch(step: int) -> dict[str, np.ndarray]:
            rows = self.problems.batch(step, size)
            texts = [self.template.replace("{question}", row.question) for row in rows]
            return {"prompts": np.array(texts, object), "answer": np.array([row.answer for row in rows], object)}

        yield from (batch(0) for _ in range(self._resumed_at))
        updates = self.config.rollout.updates_per_rollout
        for step in range(self._resumed_at // updates, self.config.steps // updates):
            yield batch(step)

    def _rewarded(self, **given: Any) -> dict[str, Any]:
        self._rewards = [float(reward) for reward in given["rewards"]]
        return {}

    def _learner(self) -> Any:
        config, rollout = self.config, self.config.rollout
        model, reference = self.policy.model, None
        if config.loss.kl_coef:
            reference = nnx.clone(model)
        if config.model.lora is not None:
            model = add_lora(model, config.model.lora, self.mesh, config.seed)
        roles = (tunix.Role.ACTOR, tunix.Role.REFERENCE, tunix.Role.ROLLOUT)
        # Tunix calls it as it would a class.
        engine: Any = partial(
            StepRollout,
            seed=config.seed,
            step=lambda: self._rollout_step(),
            record=Path(config.record_rollouts) if config.record_rollouts else None,
            replay=Path(config.replay_rollouts) if config.replay_rollouts else None,
        )
        cluster = tunix.RLCluster(
            actor=model,
            reference=reference,
            tokenizer=self.policy.tokenizer,
            cluster_config=tunix.ClusterConfig(
                role_to_mesh=dict.fromkeys(roles, self.mesh),
                rollout_engine=engine,
                training_config=tunix.RLTrainingConfig(
                    actor_optimizer=make_optimizer(config.optimizer, config.steps),
                    eval_every_n_steps=config.steps + 1,
                    max_steps=config.steps,
                    checkpoint_root_directory=str((self.folder / "checkpoints").absolute()),
                    checkpointing_options=checkpoint_options(config.checkpoint_every or config.steps),
                    data_sharding_axis=("fsdp",),
                ),
                rollout_config=RolloutConfig(
                    max_tokens_to_generate=rollout.max_new_tokens,
                    temperature=rollout.temperature,
                    top_p=rollout.top_p,
                    top_k=rollout.top_k,
                    max_prompt_length=rollout.max_prompt_tokens,
                    # The cache must hold more than prompt and completion.
                    kv_cache_size=rollout.max_prompt_tokens + rollout.max_new_tokens + 1,
                ),
            ),
        )
        rewards = [REWARDS[name] for name in config.rewards]
        learner = GRPOLearner(cluster, grpo_config(config), rewards, metric_fns=[self._rewarded])
        install_loss(learner, config.loss, self.mesh)
        trainer = cluster.actor_trainer
        trainer.with_rl_metrics_to_log(trainer.rl_metrics_to_log | {"entropy": np.mean})
        return learner


class _Stop(Exception):
    """Ends Tunix's loop at an update whose checkpoint is written."""


class _Hooks:
    """What Tunix calls around an update."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def on_train_step_start(self, trainer: Any) -> None:
        self._session._began = time.perf_counter()

    def on_train_start(self, trainer: Any) -> None: ...

    def on_train_end(self, trainer: Any) -> None: ...

    def on_train_step_end(self, trainer: Any, step: int, loss: Any) -> None: ...


class _Checkpoints:
    """Tunix's checkpoint manager, called after each update: numbers first, so that no checkpoint is ahead of them."""

    def __init__(self, session: Session, manager: Any) -> None:
        self._session, self._manager = session, manager
        self._last = session._resumed_at

    def save(self, step: int, model: Any, optimizer: Any = None, **options: Any) -> bool:
        session = self._session
        if step > self._last:
            self._last = step
            session.updated(step)
        at_boundary = step % session.config.rollout.updates_per_rollout == 0
        stop = session.stopped and at_boundary
        if not at_boundary:
            return False
        force = bool(options.pop("force", False)) or stop
        if force and self._manager.latest_step() == step:
            return False
        saved = False
        if force or self._manager._checkpoint_manager.should_save(step):
            check_free_space(session.folder, model, optimizer)
            try:
                saved = self._manager.save(step, model, optimizer, force=force, **options)
                if stop:
                    self._manager._checkpoint_manager.wait_until_finished()
            except OSError as error:
                raise TrainError(
                    f"checkpoint of update {step} cannot be written to {session.folder}: {error.strerror or error}; "
                    "earlier ones are whole: free some space and run again"
                ) from error
        if stop:
            raise _Stop
        return saved

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def close(self) -> None:
        self._manager.close()


def commits_of_run(folder: Path) -> list[dict[str, Any]]:
    """Commits of this package that a run was made with, oldest first: more than one where it was resumed by another."""
    path = folder / "commits.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    now = commit_of_package()
    if now not in known:
        known.append(now)
        replace_file(path, json.dumps(known, indent=1).encode())
    return known


def check_free_space(folder: Path, model: Any, optimizer: Any) -> None:
    """Raises TrainError where a checkpoint would not fit, before any of it is written."""
    # As Tunix saves them: of a model with adapters, the adapters alone.
    kept = nnx.state(model, nnx.LoRAParam) if is_lora_enabled(model) else nnx.state(model)
    leaves = jax.tree.leaves((kept, nnx.state(optimizer, nnx.optimizer.OptState)))
    needed = int(sum(x.nbytes for x in leaves) * FREE_FACTOR)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise TrainError(
            f"output={folder}: {free / 1e9:.2f} GB are free and a checkpoint needs {needed / 1e9:.2f} GB; earlier ones "
            "are whole: free some space and run again"
        )


def checkpoint_options(every: int) -> Any:
    """Every so many updates, the last two kept."""
    return ocp.CheckpointManagerOptions(save_interval_steps=every, max_to_keep=2)


def make_mesh(sizes: dict[str, int]) -> jax.sharding.Mesh:
    """The mesh of a run, of axes that GSPMD partitions, as Tunix needs.

    Raises:
        TrainError: more devices than there are.
    """
    shape = sizes.get("fsdp", 1), sizes.get("tp", 1)
    needed, found = shape[0] * shape[1], jax.device_count()
    if needed > found:
        raise TrainError(f"mesh={sizes}: needs {needed} devices; there are {found} ({jax.devices()[0].platform})")
    devices = np.array(jax.devices()[:needed]).reshape(shape)
    return jax.sharding.Mesh(devices, ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def make_optimizer(config: OptimizerConfig, steps: int) -> Any:
    """AdamW as the config says."""
    rate, warmup = config.learning_rate, config.warmup_steps
    if config.schedule == "cosine":
        schedule = optax.warmup_cosine_decay_schedule(0.0 if warmup else rate, rate, warmup, max(steps, warmup + 1))
    elif warmup:
        schedule = optax.linear_schedule(0.0, rate, warmup)
    else:
        schedule = rate
    adam = optax.adamw(schedule, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay)
    return adam if config.max_grad_norm is None else optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adam)


def template_of(config: TrainConfig, policy: Policy) -> str:
    """The prompt around the problem."""
    if config.data.template is not None:
        if "{question}" not in config.data.template:
            raise TrainError(f"train config: data.template={config.data.template!r} has no {{question}} in it")
        return config.data.template
    if config.data.task == "chain_sum" and config.model.source != "tiny":
        return policy.template.replace("{question}", SUM_QUESTION)
    return policy.template


def device_peak_bytes() -> int | None:
    """The most bytes in use on any device so far, where it reports them (a CPU does not)."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    return max(peaks) if peaks else None


def process_peak_bytes() -> int:
    """The largest resident size of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
