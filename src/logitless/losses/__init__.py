"""Losses of per-token log-probabilities; `linear` holds the calls that take hidden states."""
