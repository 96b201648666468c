"""Training of heads for a target: its own continuations recorded, then distilled."""
