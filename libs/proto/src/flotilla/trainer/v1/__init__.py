"""Generated code of flotilla.trainer.v1."""
