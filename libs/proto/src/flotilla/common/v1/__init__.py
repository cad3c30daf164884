"""Generated code of flotilla.common.v1."""
