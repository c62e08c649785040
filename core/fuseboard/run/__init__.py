"""What a call goes through: regions' code, programs, the runner, weights."""
