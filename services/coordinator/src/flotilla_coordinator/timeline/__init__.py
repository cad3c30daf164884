"""The timeline: spans of every process arrive by OTLP, stay in SQLite and leave as a Chrome trace."""
