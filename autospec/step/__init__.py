"""Around one step: its record, its kernels, and the running requests."""
