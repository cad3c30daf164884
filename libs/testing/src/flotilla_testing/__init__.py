"""Simulated fleets, fault injection, ledger checks and fixtures for tests."""
