"""What happens in a program: traces, sampling, memory."""
