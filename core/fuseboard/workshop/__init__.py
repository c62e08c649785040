"""The process that tries candidates beside calls, and what goes there and back."""
