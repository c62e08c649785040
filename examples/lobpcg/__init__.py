"""Eigenpairs by LOBPCG, the update compiled: a program to profile, and a solver to copy."""
