"""Coordinator service: runs, the ledger, the timeline and the command line."""
