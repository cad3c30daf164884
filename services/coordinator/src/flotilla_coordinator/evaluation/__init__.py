"""Evaluates the policy on held-out data, in the loop or while training continues."""
