"""Stacks to test on, simulated fleets and fault injection, for tests and benches."""
