"""Hidden states, or logits, to per-token statistics. `api` is the door."""
