"""What to run: which model, which methods, what to measure."""
