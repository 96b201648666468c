"""What a step costs, learned online."""
