"""Generated code of flotilla.generator.v1."""
