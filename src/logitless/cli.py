"""The command `logitless`: one subcommand a job, one YAML file a run.

Nothing heavy is imported before a subcommand is known, so that `--help` answers at once.
"""

import argparse
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from logitless import __version__

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

EXIT_CODES = """\
exit codes:
  0    done, and every check passed
  1    a check failed; the output says which
  2    the input is wrong; one line on stderr says what to change
  130  stopped by Ctrl-C"""


@dataclass(frozen=True)
class _Job:
    """A subcommand: what its help says, and how to get its config class and its runner when they are wanted."""

    summary: str
    description: str
    load: Callable[[], tuple[type, Callable[[Any], int]]]


def _bench() -> tuple[type, Callable[[Any], int]]:
    from logitless.bench.cases import BenchConfig
    from logitless.bench.run import run_bench

    return BenchConfig, run_bench


def _gradcheck() -> tuple[type, Callable[[Any], int]]:
    from logitless.bench.gradcheck_cases import GradcheckConfig, run_gradcheck

    return GradcheckConfig, run_gradcheck


def _audit() -> tuple[type, Callable[[Any], int]]:
    from logitless.bench.audit_cases import AuditConfig, run_audit

    return AuditConfig, run_audit


def _plan() -> tuple[type, Callable[[Any], int]]:
    import jax

    # Nothing is run here: this process needs no device, and on a machine without a TPU libtpu only makes noise.
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    from logitless.bench.plan_cases import PlanConfig
    from logitless.bench.plan_run import run_plan

    return PlanConfig, run_plan


def _compile() -> tuple[type, Callable[[Any], int]]:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from logitless.bench.compile_matrix import CompileConfig, run_compile

    return CompileConfig, run_compile


def _train() -> tuple[type, Callable[[Any], int]]:
    from logitless.train.config import TrainConfig
    from logitless.train.run import run_train

    return TrainConfig, run_train


def _ab() -> tuple[type, Callable[[Any], int]]:
    from logitless.train.ab import run_ab
    from logitless.train.ab_config import AbConfig

    return AbConfig, run_ab


def _ab_plan() -> tuple[type, Callable[[Any], int]]:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from logitless.train.ab_config import AbConfig
    from logitless.train.step_plan import run_plan_ab

    return AbConfig, run_plan_ab


def _inspect() -> tuple[type, Callable[[Any], int]]:
    from logitless.source_audit.run import InspectConfig, run_inspect

    return InspectConfig, run_inspect


def _tune() -> tuple[type, Callable[[Any], int]]:
    from logitless.bench.tune import TuneConfig, run_tune

    return TuneConfig, run_tune


JOBS = {
    "train": _Job(
        "GRPO on Tunix, with the fused loss",
        """\
Trains a Qwen2 or Qwen2.5 model by GRPO on tasks whose answers can be verified, on Google's Tunix, with the losses of
Logitless. Writes metrics.jsonl and checkpoints into its output folder; stopped in any way and run again, it resumes.
Ctrl-C finishes the batch at hand and leaves a checkpoint. Needs pip install 'logitless[train]'.

example:
  logitless train configs/train_quickstart.yaml --loss.level hidden --loss.kl_coef 0.02""",
        _train,
    ),
    "ab": _Job(
        "the same training with several losses: is it the same, and what does it cost?",
        """\
Trains with each loss section of the config, in a process of its own, on the same data and seeds, and writes a report
with curves, time and memory of an update, and a verdict. Appends a record to results/. Exit code 1 when an arm has no
parity with the first or a bound of the config does not hold. Needs pip install 'logitless[train]'.

example:
  logitless ab configs/ab_quickstart.yaml""",
        _ab,
    ),
    "bench": _Job(
        "time and memory of implementations, side by side",
        """\
Runs the loss and its gradients by several implementations, each in a process of its own, and shows time and
memory. No number is shown before the implementation passed gradcheck and audit. Appends a record to results/.

examples:
  logitless bench configs/quickstart.yaml
  logitless bench report README.md results   # tables and plots of a page, anew from the records""",
        _bench,
    ),
    "gradcheck": _Job(
        "are loss, log-probabilities and gradients right?",
        """\
Compares the loss, the log-probabilities and every gradient of an implementation with plain jnp in float64. The
implementation may err as much as plain jnp errs in its own dtype, times a factor, and no more. Prints a table,
names the worst element of each failure, and appends one record a case to results/gradcheck.jsonl.

example:
  logitless gradcheck configs/gradcheck_small.yaml --results_dir /tmp/results""",
        _gradcheck,
    ),
    "audit": _Job(
        "does the loss hold a [tokens, vocab] array anywhere?",
        """\
Traces and compiles the GRPO loss and its gradients at the given sizes, without running them, and lists every
array of about tokens x vocabulary elements with the source line that made it.

example:
  logitless audit configs/audit_qwen25_1p5b.yaml --tokens 4096""",
        _audit,
    ),
    "plan": _Job(
        "does it fit, and how fast is it, on a chip that is not here?",
        """\
Compiles the loss and its gradients for named TPUs (or NVIDIA cards) with their own compiler, in a process of its
own, without running anything, and shows memory, which is exact, and time, which is the compiler's estimate.
Appends a record to results/. TPUs need pip install 'logitless[tpu]'.

examples:
  logitless plan configs/plan_qwen25_7b_v6e.yaml
  logitless plan configs/plan_solve_v6e.yaml --reserve_gb 12   # the most tokens that fit beside 12 GB
  logitless plan calibrate   # the estimate of time against public timings (tokamax 0.0.17, Python 3.12)""",
        _plan,
    ),
    "inspect": _Job(
        "does another project's loss take hidden states, or logits?",
        """\
Reads the source of other projects, and never runs it: which of their losses take hidden states and the LM head,
which take logits, and on which lines that can be seen. TARGET is a folder, a .py file, an archive, a git URL, or a
package of the registry at a version; copies are kept in $LOGITLESS_CACHE.

examples:
  logitless inspect liger-kernel==0.8.5 --show
  logitless inspect ./trl file:///srv/verl.git@main --markdown > report.md
  logitless inspect liger-kernel==0.8.4 liger-kernel==0.8.5 --compare
  logitless inspect configs/inspect_reference.yaml""",
        _inspect,
    ),
}

SECOND_WORDS = {
    "ab plan": _Job(
        "the update of each arm of an A/B on a TPU that is not here",
        """\
Compiles one whole update (model, loss, gradients, optimizer) of each arm for the topology of the config, by the TPU's
own compiler, and shows its memory, which is exact, and its time, which is an estimate. Nothing is run.

example:
  logitless ab plan configs/ab_gsm8k_qwen25_1p5b_v6e8.yaml""",
        _ab_plan,
    ),
    "bench tune": _Job(
        "which block sizes are fastest?",
        """\
Tries the few block sizes that fit for each chip, head and TPU kernel, and writes the smallest within 1 % of the fastest
into a table that the kernels read. On a TPU it times them; elsewhere it ranks them by the compiler's schedule, as plan
does. What was compiled once is not compiled again.

example:
  logitless bench tune configs/tune_v6e.yaml --out src/logitless/data/block_sizes.json""",
        _tune,
    ),
    "plan compile": _Job(
        "do the TPU kernels compile at every size, on every chip?",
        """\
Compiles the log-probabilities and both gradients by the TPU kernels for each chip, size and layout, without running
anything, and writes one line a cell into results/: what compiled, with its blocks, VMEM and schedule, or why not.
It can be stopped and started again: what was compiled once is not compiled again.

example:
  logitless plan compile configs/compile_matrix.yaml""",
        _compile,
    ),
}
"""Jobs of two words; `bench report` and `plan calibrate`, which read no config, stand in `_run`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the words after `logitless`; those of the process unless given.

    Returns:
        The exit code: 0 done, 1 a check failed, 2 bad input (one line on stderr), 130 stopped by Ctrl-C.

    Example:
        >>> main(["--version"])
        logitless 0.1.0
        0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0 if words else BAD_INPUT
    if words[0] == "--version":
        print(f"logitless {__version__}")
        return 0
    if words[0] not in JOBS:
        return _complain("logitless", f"no command {words[0]!r}; choose from {', '.join(JOBS)} (see logitless --help)")
    try:
        return _run(words[0], words[1:])
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(command: str, words: list[str]) -> int:
    if f"{command} {words[0] if words else ''}" in SECOND_WORDS:
        command, words = f"{command} {words[0]}", words[1:]
    program = f"logitless {command}"
    if command == "bench" and words[:1] == ["report"]:
        from logitless.bench.report import main as report

        return report(words[1:])
    if command == "plan" and words[:1] == ["calibrate"]:
        return _guarded(program, lambda: _calibrate(words[1:]))
    if command == "inspect":
        return _guarded(program, lambda: _inspected(words))
    if any(word in ("-h", "--help") for word in words):
        _parser(command).print_help()
        return 0
    return _guarded(program, lambda: _job(command).load()[1](read_config(command, words)))


def _inspected(words: list[str]) -> int:
    """Its words are targets, or a YAML file and what overrides it."""
    from logitless.source_audit.run import config_of, is_config, parser, run_inspect

    if is_config(words):
        return run_inspect(read_config("inspect", words))
    made = parser(_job("inspect").description, EXIT_CODES)
    if any(word in ("-h", "--help") for word in words):
        made.print_help()
        return 0
    return run_inspect(config_of(words, made))


def _calibrate(words: list[str]) -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from logitless.bench.plan_calibrate import main as calibrate

    return calibrate(words)


def _guarded(program: str, job: Callable[[], int]) -> int:
    """The exit code of a job; what it refuses becomes one line."""
    try:
        return job()
    except _BadInput as error:
        return _complain(program, str(error))
    except (ValueError, NotImplementedError, OSError) as error:
        if not _raised_on_purpose(error):
            raise
        return _complain(program, str(error))


def read_config(command: str, words: Sequence[str]) -> Any:
    """The frozen config of a command, from a YAML file and the overrides after it; raises one-line errors."""
    if not words or words[0].startswith("-"):
        raise _BadInput(f"the first argument must be a YAML file: logitless {command} CONFIG.yaml [--key value ...]")
    path, overrides = words[0], words[1:]
    _check_yaml(Path(path))
    parser = _parser(command)
    try:
        namespace = parser.parse_args(["--config", path, *overrides])
    except ArgumentError as error:
        raise _BadInput(f"{path}: {_plain_words(str(error))}") from error
    del namespace["config"]
    config_class = _job(command).load()[0]
    return config_class(**vars(parser.instantiate(namespace)))


def _job(command: str) -> _Job:
    return JOBS[command] if command in JOBS else SECOND_WORDS[command]


class _BadInput(Exception):
    """A config file that cannot be read."""


def _parser(command: str) -> ArgumentParser:
    program, job = f"logitless {command}", _job(command)
    parser = ArgumentParser(
        prog=program,
        usage=f"{program} CONFIG.yaml [--key value ...]",
        description=f"{job.description}\n\nEvery key of the YAML file can also be given on the command line, and wins.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        exit_on_error=False,
    )
    parser.add_class_arguments(job.load()[0], fail_untyped=True)
    parser.add_argument("--config", action="config", help=argparse.SUPPRESS)
    return parser


def _check_yaml(path: Path) -> None:
    """Says in one line why a file is no config, before a parser of any kind sees it."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _BadInput(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise _BadInput(f"{path}: cannot be read: {error}") from error
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _BadInput(f"{path}: not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise _BadInput(
            f"{path}: must hold 'key: value' lines; it holds {'nothing' if content is None else repr(content)}"
        )


def _plain_words(message: str) -> str:
    """The parser's nested message as one line: `cases: tokens: Expected a <class 'int'>. Got value: five`."""
    message = re.sub(r"Problem with given class_path '[^']*':", "", message)
    return re.sub(r'Parser key "([^"]+)":', r"\1:", message)


def _raised_on_purpose(error: BaseException) -> bool:
    """True when our own code raised it, so that it teaches. One out of jax is a bug and keeps its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(__file__).parent)


def _complain(program: str, message: str) -> int:
    print(f"{program}: error: {' '.join(message.split())}", file=sys.stderr)
    return BAD_INPUT


def _overview() -> str:
    jobs = JOBS | SECOND_WORDS
    width = max(map(len, jobs))
    commands = "\n".join(f"  {name:<{width}}  {job.summary}" for name, job in jobs.items())
    return f"""\
usage: logitless COMMAND CONFIG.yaml [--key value ...]

Losses for language models straight from hidden states and the LM head, without ever holding the logits.

commands:
{commands}

options:
  --help     this text; logitless COMMAND --help lists the keys of its config
  --version  the version

example:
  logitless gradcheck configs/gradcheck_small.yaml

{EXIT_CODES}"""


if __name__ == "__main__":
    sys.exit(main())
