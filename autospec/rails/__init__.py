"""What overrules an adaptive policy, and what it goes by."""
