"""What is right: references in float64, and verdicts on what was computed."""
