"""What was decided before: the cost database."""
