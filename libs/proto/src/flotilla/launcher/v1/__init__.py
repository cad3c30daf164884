"""Generated code of flotilla.launcher.v1."""
