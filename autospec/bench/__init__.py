"""Arms compared by serving the same requests in turns, and what is shown of it."""
