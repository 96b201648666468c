"""Recorded traffic run again on a simulated clock, and how it is recorded."""
