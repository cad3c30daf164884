"""From lines of a data file to token ids, once and for all services."""
