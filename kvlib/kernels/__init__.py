"""Loops over a cache that are faster in C than out of torch's operators, compiled by the system's compiler when needed."""
