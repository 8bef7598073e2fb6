"""The schedule's reader against counts made by hand from the grid, on stored dumps of two versions of libtpu."""

import collections
import re
import shutil
from pathlib import Path

import pytest

from logitless.plan import bundles, scalar_unit, schedule
from logitless.plan.schedule import ScheduleError, kernel_names, read_kernel

# What make_dumps.py compiled; it is not imported, so that these tests need no Pallas.
GRID = (3, 5)
SWEEPS, STEPS = 3, 15
LOOP_TURNS = 7
PIPELINE_STEPS = STEPS + 2  # One more to fetch the first blocks, one to wait for the last.
TILE_REGISTERS = 16  # 128 x 128 float32 in registers of 8 x 128.
PACKED_REGISTERS = 8  # The same in bfloat16.
PRODUCT_SLOTS = 32  # 128 rows of the 128 x 128 product, 4 a cycle.
BLOCK_BYTES = 128 * 128 * 2

DUMPS = Path(__file__).parent / "dumps"
VERSIONS = ("0.0.42.1", "0.0.52")


@pytest.fixture(params=VERSIONS)
def dump(request):
    return DUMPS / request.param


def slots(kernel, column, capacity=2):
    """Slots used over all cycles, on a v6e."""
    return round(kernel.slot_use[column] * capacity * kernel.cycles, 3)


def branches(dump, name):
    """(address, destination) of a kernel's branches, by a pattern of the test's own."""
    text = bundles.read_text(bundles.find_file(dump, name, bundles.BUNDLES))
    found = re.findall(r"^ *(0x[0-9a-f]+) (?:(?!^ *0x).)*?sbr\.rel \S+ target bundleno = (\d+)", text, re.M | re.S)
    return [(int(address, 16), int(destination)) for address, destination in found]


def by_hand(dump, name, times):
    """Cycles of a kernel whose branches are: skip the body, two regions inside it, back to the loop's start."""
    (skip, body_end), (first, first_end), (second, second_end), (back, start) = branches(dump, name)
    bundle_count = bundles.parse_program(bundles.read_text(bundles.find_file(dump, name, bundles.BUNDLES))).bundles
    body = body_end - (skip + 5)
    regions = first_end - (first + 5), second_end - (second + 5)
    turn = back + 5 - start - body
    outside = bundle_count - (back + 5 - start)
    inside = STEPS * (body - sum(regions)) + sum(n * region for n, region in zip(times, regions, strict=True))
    return outside + PIPELINE_STEPS * turn + inside


def test_first_and_last_step_of_the_inner_axis(dump):
    kernel = read_kernel(dump, "kernel_sweep", GRID)
    assert kernel.cycles == by_hand(dump, "kernel_sweep.1", times=(SWEEPS, SWEEPS))
    stores = SWEEPS * TILE_REGISTERS + STEPS * TILE_REGISTERS + SWEEPS * PACKED_REGISTERS
    assert slots(kernel, "VSTORE") == stores
    assert kernel.mxu == pytest.approx(STEPS * PRODUCT_SLOTS / (2 * kernel.cycles))
    assert kernel.undecided == () and kernel.least_mxu == kernel.mxu


def test_full_and_tail_body_count_once_together(dump):
    kernel = read_kernel(dump, "kernel_tail", GRID)
    assert kernel.cycles == by_hand(dump, "kernel_tail.1", times=(STEPS - SWEEPS, SWEEPS))
    # The same kernel compiled without the condition does as many products and stores.
    unconditional = read_kernel(dump, "kernel_full", GRID)
    assert kernel.mxu * kernel.cycles == pytest.approx(unconditional.mxu * unconditional.cycles)
    assert slots(kernel, "VSTORE") == slots(unconditional, "VSTORE") == STEPS * PACKED_REGISTERS
    # Two more branches a step and the mask are all that it costs more.
    assert unconditional.cycles < kernel.cycles < unconditional.cycles + 50 * STEPS
    assert kernel.undecided == ()


def test_copies_from_and_to_hbm(dump):
    for name in ("kernel_sweep", "kernel_tail", "kernel_loop"):
        kernel = read_kernel(dump, name, GRID)
        assert kernel.hbm_read_bytes == 2 * STEPS * BLOCK_BYTES
        assert kernel.hbm_write_bytes == SWEEPS * BLOCK_BYTES


def test_loop(dump):
    kernel = read_kernel(dump, "kernel_loop", GRID)
    assert slots(kernel, "VSTORE") == STEPS * LOOP_TURNS * TILE_REGISTERS
    assert kernel.undecided == ()


def test_nested_loop_with_a_trip_count_from_the_grid(dump):
    kernel = read_kernel(dump, "kernel_nested", GRID)
    inner_turns = sum(i + 1 for i in range(GRID[0])) * GRID[1]
    assert slots(kernel, "VSTORE") == LOOP_TURNS * inner_turns * TILE_REGISTERS
    assert kernel.undecided == ()


def test_dynamic_axis_counts_as_many_steps_as_the_grid_says(dump):
    static = read_kernel(dump, "kernel_sweep", GRID)
    three, four, five = (read_kernel(dump, "kernel_dynamic", (n, GRID[1])) for n in (3, 4, 5))
    assert slots(three, "VSTORE") == slots(static, "VSTORE")
    assert three.hbm_read_bytes == static.hbm_read_bytes
    assert slots(four, "VSTORE") * 3 == slots(three, "VSTORE") * 4
    assert four.cycles - three.cycles == five.cycles - four.cycles > 0
    assert read_kernel(dump, "kernel_dynamic", (0, GRID[1])).hbm_read_bytes == 0


def test_data_dependent_region_counts_in_full_and_is_reported(dump):
    kernel = read_kernel(dump, "kernel_single", GRID)
    (region,) = kernel.undecided
    assert region.cycles == STEPS * (region.end - region.start)
    assert kernel.mxu == pytest.approx(STEPS * PRODUCT_SLOTS / (2 * kernel.cycles))
    # The product is in that region: none without it.
    assert kernel.least_mxu == 0 and kernel.least_cycles == kernel.cycles - region.cycles
    assert "spop" in region.condition and "3.0" in region.condition
    assert not region.is_loop


def test_of_a_data_dependent_condition_and_its_negation_the_longer_region_counts(dump):
    kernel = read_kernel(dump, "kernel_data", GRID)
    large, small = kernel.undecided
    assert large.cycles == STEPS * (large.end - large.start) > 0
    assert small.cycles == 0 and small.end > small.start
    assert {large.condition, small.condition} == {f"not {small.condition}", small.condition}
    # The longer one holds the product; the stores of the other are not counted.
    assert kernel.mxu == pytest.approx(STEPS * PRODUCT_SLOTS / (2 * kernel.cycles))
    assert STEPS * TILE_REGISTERS <= slots(kernel, "VSTORE") < 2 * STEPS * TILE_REGISTERS


def test_loop_of_unknown_length_counts_one_turn_and_is_reported(dump):
    kernel = read_kernel(dump, "kernel_endless", GRID)
    (region,) = kernel.undecided
    assert region.is_loop
    assert region.cycles == STEPS * (region.end - region.start)


def test_spills(dump):
    kernel = read_kernel(dump, "kernel_spills", GRID)
    # Half of the tiles do not fit, and are stored and loaded at least once a turn.
    assert kernel.spill_stores > STEPS * LOOP_TURNS * 4 * TILE_REGISTERS
    assert kernel.spill_loads > STEPS * LOOP_TURNS * 4 * TILE_REGISTERS
    unspilled = read_kernel(dump, "kernel_sweep", GRID)
    assert unspilled.spill_stores == unspilled.spill_loads == 0
    # Two buffers of each block, the accumulator, and the spilled registers of 4 KiB.
    assert unspilled.vmem_bytes == 3 * 2 * BLOCK_BYTES + 128 * 128 * 4
    assert kernel.vmem_bytes >= unspilled.vmem_bytes + 64 * 4096


def test_kernel_names(dump):
    assert "kernel_sweep.1" in kernel_names(dump)
    assert read_kernel(dump, "kernel_sweep.1", GRID) == read_kernel(dump, "kernel_sweep", GRID)


def test_refuses_a_name_that_is_not_there(dump):
    with pytest.raises(ScheduleError, match="0 instructions in .* are named kernel_none; .*kernel_sweep.1"):
        read_kernel(dump, "kernel_none", GRID)


def test_refuses_a_grid_that_was_not_compiled(dump):
    with pytest.raises(ScheduleError, match=r"compiled for the grid \(3, 5\), not \(3, 6\)"):
        read_kernel(dump, "kernel_sweep", (3, 6))


def test_refuses_a_dump_with_a_file_missing(dump, tmp_path):
    shutil.copy(bundles.find_file(dump, "kernel_sweep.1", bundles.BUNDLES), tmp_path)
    with pytest.raises(ScheduleError, match="0 files of kernel_sweep.1 end in pre-delay.*empty folder"):
        read_kernel(tmp_path, "kernel_sweep", GRID)


def test_refuses_a_run_without_end(dump, monkeypatch):
    monkeypatch.setattr(scalar_unit, "MAX_BLOCKS", 20)
    with pytest.raises(ScheduleError, match="gave the run up after 20 blocks"):
        read_kernel(dump, "kernel_sweep", GRID)


def test_refuses_bundles_with_a_gap():
    with pytest.raises(ScheduleError, match="not numbered from 0"):
        bundles.parse_program("     0   :  {}\n   0x2   :  {}\n")


def test_refuses_slots_that_do_not_fit_their_columns():
    with pytest.raises(ScheduleError, match="do not fit"):
        bundles.parse_slots("== CAPACITY:\nMXU, SALU\n  2   2\n== UTILIZATION:\n0 0 0\n")


@pytest.mark.parametrize(
    ("operation", "values", "expected"),
    [
        ("sadd.s32", (2**32 - 1, 5), 4),
        ("ssub.s32", (0, 1), -1),
        ("smulhi.u32", (0xAAAAAAAB - 2**32, 9), 6),
        ("sshrl.u32", (-1, 28), 15),
        ("sshra.s32", (-16, 2), -4),
        ("scmp.lt.s32", (-1, 1), True),
        ("scmp.lt.u32", (-1, 1), False),
        ("smin.u32", (-1, 1), 1),
        ("por", (True, None), True),
        ("por", (False, None), None),
        ("pnand", (False, None), True),
        ("pand", (True, True), True),
        ("pneg", (False,), True),
        ("scalar_select", (None, 3, 3), 3),
        ("scalar_select", (None, 3, 4), None),
        ("spop", (7,), None),
    ],
)
def test_scalar_instruction(operation, values, expected):
    assert scalar_unit.evaluate(operation, values) == expected


def test_of_two_regions_that_exclude_each_other_the_least_time_has_the_shorter():
    def region(start, end, condition, holds, is_loop=False):
        return scalar_unit.Undecided(start, end, condition, holds, is_loop)

    pair = [region(2, 8, "%p", True), region(8, 11, "%p", False)]
    alone, loop = region(11, 15, "%q", True), region(15, 17, "%r", True, is_loop=True)
    ran = scalar_unit.Run([3] * 20, [*pair, alone, loop], collections.Counter(), {})
    # 20 bundles, three times; without the longer of the pair, and without the region that stands alone.
    assert sum(schedule._least_visits(ran)) == 3 * (20 - 6 - 4)
    schedule._settle_exclusive(ran)
    assert sum(ran.visits) == 3 * (20 - 3)
