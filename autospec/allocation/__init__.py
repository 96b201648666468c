"""Who drafts and how many tokens: the choice of one step."""
