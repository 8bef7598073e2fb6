"""Memory and speed on a chip that is not here: `plan_function` for any function, `largest` for the size that fits."""

from logitless.plan.chips import CHIPS, Chip, Topology, topology
from logitless.plan.compiler import CompilerMissing
from logitless.plan.planner import largest, plan_function
from logitless.plan.report import KernelPlan, ProgramPlan

__all__ = [
    "CHIPS",
    "Chip",
    "CompilerMissing",
    "KernelPlan",
    "ProgramPlan",
    "Topology",
    "largest",
    "plan_function",
    "topology",
]
