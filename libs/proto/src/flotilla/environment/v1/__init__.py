"""Generated code of flotilla.environment.v1."""
