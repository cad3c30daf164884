"""Generated code of flotilla.coordinator.v1."""
