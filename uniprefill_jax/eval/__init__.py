"""Accuracy, kept tokens and speed of the same runs: RULER, harder probes, and the search for a model's own setting."""
