"""Trainer service: a gang of sharded ranks behind one torch-free front process."""
