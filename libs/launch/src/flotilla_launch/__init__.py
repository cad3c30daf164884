"""Launchers that place, supervise and stop the processes of a stack."""
