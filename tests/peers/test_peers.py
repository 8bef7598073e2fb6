"""Our losses against those of installed peers: TRL, Liger and torch, on the CPU. `docs/peers.md` holds the table."""

import math

import numpy as np
import pytest
from peer_cases import KL, PAIRS, POLICY
from peer_compare import RTOL, gradient_gap, ours_of, theirs_of
from peer_inputs import logprobs_of, make_batch, rollout_weights
from torch_peers import Result

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("index", range(len(PAIRS)), ids=[f"{case.name} ({peer})" for case, peer in PAIRS])
def test_loss_and_gradients_are_those_of_the_peer_or_differ_as_stated(index):
    case, peer = PAIRS[index]
    theirs = theirs_of(case, peer)
    ours = ours_of(index)
    assert all(np.isfinite(x).all() for x in ours)
    stated = case.differs.get(peer)
    if stated is None:
        assert theirs.loss == pytest.approx(ours.loss, rel=RTOL, abs=0)
        assert gradient_gap(ours, theirs) <= RTOL
        return
    assert ours.loss == pytest.approx(stated.ours, rel=RTOL, abs=1e-8)
    assert theirs.loss == pytest.approx(stated.theirs, rel=RTOL, abs=1e-8, nan_ok=True)
    finite = all(np.isfinite(x).all() for x in theirs[1:])
    assert finite == stated.finite, "the peer's gradients are no longer what is stated"
    same = math.isclose(ours.loss, theirs.loss, rel_tol=1e-3) and gradient_gap(ours, theirs) <= 1e-3
    assert not same, f"{peer} agrees now: strike the difference out"


def test_the_inputs_reach_every_branch():
    batch = make_batch()
    assert batch.old is not None
    mask = batch.mask != 0
    log_ratio = logprobs_of(batch.hidden, batch.lm_head, batch.targets) - batch.old
    ratio = np.exp(log_ratio)
    up = (batch.advantages[:, None] > 0) & mask
    down = (batch.advantages[:, None] < 0) & mask
    for name, tokens in {
        "unclipped, A > 0": up & (ratio > 0.8) & (ratio < 1.2),
        "unclipped, A < 0": down & (ratio > 0.8) & (ratio < 1.2),
        "clipped above, A > 0": up & (ratio > 1.28),
        "clipped below, A < 0": down & (ratio < 0.8),
        "beyond delta 1.5, A < 0": down & (ratio > 1.5),
        "beyond cispo's 1.3": mask & (ratio > 1.3),
        "rollout weight truncated": mask & (rollout_weights(batch) == 2.0),
        "rollout weight masked": mask & (rollout_weights(batch, mode="mask") == 0.0),
    }.items():
        assert 0 < tokens.sum() < mask.sum(), name
    mean = (log_ratio * mask).sum(1) / mask.sum(1)
    inside = (np.exp(mean) > 0.88) & (np.exp(mean) < 1.17)
    assert 0 < inside.sum() < len(mean), f"sequence ratios {np.exp(mean)}"


def test_every_stated_difference_is_of_a_peer_that_is_compared():
    for case, _ in PAIRS:
        assert set(case.differs) <= set(case.theirs), case.name


def test_a_wrong_loss_does_not_pass():
    index = next(i for i, (case, peer) in enumerate(PAIRS) if case.name == "grpo, k3" and peer == "Liger")
    wrong = theirs_of(POLICY[0], "Liger")
    ours = ours_of(index)
    assert KL["kl_coef"] > 0
    assert abs(wrong.loss - ours.loss) > 100 * RTOL * abs(ours.loss)
    assert gradient_gap(ours, wrong) > 100 * RTOL
    scaled = Result(ours.loss, ours.d_hidden, ours.d_lm_head * (1 + 3 * RTOL))
    assert gradient_gap(ours, scaled) > RTOL
