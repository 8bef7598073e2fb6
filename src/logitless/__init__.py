"""Logitless: LM-head losses from hidden states, without ever holding the logits."""

__version__ = "0.1.0"
