"""How long a Mosaic kernel takes on a chip, from its schedule and its copies: a factor fitted to public timings."""

# (copies over schedule, measured over schedule): between two points a straight line. From public device timings of
# Pallas kernels on a v6e; `logitless plan calibrate` fits them anew (docs/planning.md).
POINTS = ((0.0, 1.03), (0.5, 1.03), (0.7, 1.1), (0.9, 1.25), (1.0, 1.35))


def expected_kernel_ms(schedule_ms: float, dma_ms: float | None) -> float:
    """What a kernel is expected to take on a chip; without its copies, as if they hid behind its schedule."""
    if dma_ms is None or schedule_ms == 0:
        return schedule_ms * POINTS[0][1]
    ratio = dma_ms / schedule_ms
    last_ratio, last = POINTS[-1]
    if ratio >= last_ratio:
        # Bound by its copies: they scale with what the last point says of them.
        return dma_ms * last / last_ratio
    for (low, at_low), (high, at_high) in zip(POINTS, POINTS[1:], strict=False):
        if ratio <= high:
            return schedule_ms * (at_low + (at_high - at_low) * (ratio - low) / (high - low))
    raise AssertionError
