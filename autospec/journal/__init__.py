"""The journal of decisions and outcomes: written, and read again."""
