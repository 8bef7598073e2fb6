"""Runs `logitless plan`: a plan for each chip, head, size and implementation, or the largest size that fits."""

import sys
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from logitless.bench.plan_cases import PlanCase, PlanConfig, cases_of, donated, program, strategy_of
from logitless.bench.plan_kernels import has_kernels, kernels_table
from logitless.bench.plan_report import plan_table, plan_words
from logitless.bench.plots import plot_plans
from logitless.bench.records import append_records, commit_of_package, results_folder
from logitless.ops.pallas_tpu_blocks import share_with_targets
from logitless.plan import ProgramPlan, largest, plan_function
from logitless.plan.compiler import OUT_OF_HBM, versions
from logitless.plan.planner import STOPPED

GB = 10**9
TABLE_WIDTH = 200


def run_plan(config: PlanConfig) -> int:
    """Plans every case, prints the table, appends the record and draws the plot.

    Args:
        config: what to plan; see `PlanConfig`.

    Returns:
        The exit code: 0 when every program was planned, whether it fits or not; 1 when the compiler refused one for
        another reason than memory, died or was stopped.

    Raises:
        BenchError: a config without meaning.
        CompilerMissing: the compiler is not installed; says what to install.
    """
    folder = results_folder(config.results)
    cases = cases_of(config)
    sizes = [None] if config.solve == "tokens" else list(config.tokens)
    jobs = [(case, size, name) for case in cases for size in sizes for name in config.implementations]
    found = {
        name: at
        for platform in dict.fromkeys(case.where.chip.platform for case in cases)
        for name, at in versions(platform, config.python or sys.executable).items()
    }
    about = commit_of_package() | {
        "versions": found,
        "name": config.name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    records = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("planning", total=len(jobs))
        for case, size, name in jobs:
            said = " ".join(filter(None, (name, case.variant.name, f"on {case.where}")))
            progress.update(task, description=said)

            def tell(size: int, plan: ProgramPlan, said: str = said) -> None:
                verdict = "fits" if plan.fits else "does not fit"
                progress.update(
                    task,
                    description=f"{said}: {size:,} {'sequences' if config.solve == 'batch' else 'tokens'}: {verdict}",
                )

            records.append(about | _plan(config, case, size, name, tell))
            progress.advance(task)
    append_records(folder / f"{config.name}.jsonl", records)
    # A log file has no width of its own: the table is then as wide as it needs.
    console = Console() if Console().is_terminal else Console(width=TABLE_WIDTH)
    console.print(plan_table(records))
    if has_kernels(records):
        console.print(kernels_table(records))
    for line in plan_words(records):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if config.plot:
        plot_plans(records, folder / f"{config.name}.png")
    console.print(f"recorded in {folder / config.name}.jsonl", markup=False, highlight=False, soft_wrap=True)
    return 0 if all(_answered(record["plan"]) for record in records) else 1


def _answered(plan: dict[str, Any]) -> bool:
    """Whether nothing but a lack of HBM stood in the way."""
    stopped = any(note.startswith(STOPPED) for note in plan["notes"])
    return not stopped and (plan["fits"] or OUT_OF_HBM in plan["reason"])


def _plan(config: PlanConfig, case: PlanCase, size: int | None, implementation: str, tell: Any) -> dict[str, Any]:
    """The record of one program, or of the largest one that fits."""
    options: dict[str, Any] = {
        "reserve_bytes": int(config.reserve_gb * GB),
        "timeout_s": config.timeout_s,
        "python": config.python,
        "use_cache": config.cache,
        "data_shares": share_with_targets,
        "axis_shares": case.variant.axis_shares,
        "donate_argnums": donated(case),
    }
    where = str(case.where)
    if config.solve is None:
        assert size is not None
        fn, args = program(case, implementation, config.sequences, size // config.sequences)
        tokens, plan, most = size, plan_function(fn, args, where, **options), size
    elif config.solve == "batch":
        assert size is not None
        batch, plan = largest(
            lambda n: program(case, implementation, n, size),
            where,
            step=1,
            most=max(1, config.most // size),
            tell=tell,
            **options,
        )
        tokens, most = batch * size, max(1, config.most // size) * size
    else:
        # Whole sequences at every size: one of `step` tokens each.
        tokens, plan = largest(
            lambda n: program(case, implementation, n // config.step, config.step),
            where,
            step=config.step,
            most=config.most,
            tell=tell,
            **options,
        )
        most = config.most // config.step * config.step
    return {
        "case": asdict(case) | {"where": where, "tokens": tokens, "solve": config.solve, "most": most},
        "implementation": implementation,
        "strategy": None if (strategy := strategy_of(case, tokens)) is None else asdict(strategy),
        "plan": plan.record(),
    }
