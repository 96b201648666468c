"""One file for each kind of input that a report is made of."""
