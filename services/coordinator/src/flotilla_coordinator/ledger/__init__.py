"""The ledger: what happened to every sample and every run, on disk before anyone acts on it."""
