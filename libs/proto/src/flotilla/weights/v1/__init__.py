"""Generated code of flotilla.weights.v1."""
