"""Profiles: what was learned and tuned, and the file that keeps it."""
