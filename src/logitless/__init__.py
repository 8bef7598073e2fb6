"""Logitless: LM-head losses from hidden states, without ever holding the logits."""

from .audit import assert_logitless as assert_logitless
from .audit import audit as audit
from .gradcheck import gradcheck as gradcheck
from .losses.advantage import group_advantages as group_advantages
from .losses.linear import cross_entropy as cross_entropy
from .losses.linear import dft_loss as dft_loss
from .losses.linear import linear_cross_entropy as linear_cross_entropy
from .losses.linear import linear_dft_loss as linear_dft_loss
from .losses.linear import linear_policy_loss as linear_policy_loss
from .losses.linear_presets import linear_bnpo_loss as linear_bnpo_loss
from .losses.linear_presets import linear_cispo_loss as linear_cispo_loss
from .losses.linear_presets import linear_dapo_loss as linear_dapo_loss
from .losses.linear_presets import linear_dr_grpo_loss as linear_dr_grpo_loss
from .losses.linear_presets import linear_grpo_loss as linear_grpo_loss
from .losses.linear_presets import linear_gspo_loss as linear_gspo_loss
from .losses.linear_presets import linear_luspo_loss as linear_luspo_loss
from .losses.linear_presets import linear_sapo_loss as linear_sapo_loss
from .losses.linear_presets import linear_vespo_loss as linear_vespo_loss
from .losses.metrics import add_metrics as add_metrics
from .losses.metrics import mean_metrics as mean_metrics
from .losses.metrics import sum_metrics_over as sum_metrics_over
from .losses.policy import LossOutput as LossOutput
from .losses.policy import policy_loss as policy_loss
from .losses.policy_presets import bnpo_loss as bnpo_loss
from .losses.policy_presets import dapo_loss as dapo_loss
from .losses.policy_presets import dr_grpo_loss as dr_grpo_loss
from .losses.policy_presets import grpo_loss as grpo_loss
from .losses.policy_presets import gspo_loss as gspo_loss
from .losses.policy_presets import luspo_loss as luspo_loss
from .losses.policy_presets_soft import cispo_loss as cispo_loss
from .losses.policy_presets_soft import sapo_loss as sapo_loss
from .losses.policy_presets_soft import vespo_loss as vespo_loss
from .ops.api import linear_logprobs as linear_logprobs
from .ops.api import linear_token_stats as linear_token_stats
from .ops.api import token_logprobs as token_logprobs
from .ops.api import token_stats as token_stats
from .ops.types import TokenStats as TokenStats

__version__ = "0.1.0"
