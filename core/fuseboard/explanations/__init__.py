"""What was compiled and why, for people: as text and as a page."""
