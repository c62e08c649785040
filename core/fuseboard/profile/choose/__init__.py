"""What is fastest: candidates, comparisons and decisions."""
