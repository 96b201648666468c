"""One file for each question that a report answers: its series, its charts, its words."""
