"""``autospec tune``: measure, search what serving cannot learn cheaply, keep what really wins."""
