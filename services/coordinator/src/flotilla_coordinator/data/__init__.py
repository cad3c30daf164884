"""Turns lines of a data file into token ids, once for all services."""
