"""The ledger records what happened to every sample and every run, on disk before anything acts on it."""
