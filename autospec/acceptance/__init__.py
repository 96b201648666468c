"""How likely draft tokens are to be accepted."""
