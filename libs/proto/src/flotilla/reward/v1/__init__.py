"""Generated code of flotilla.reward.v1."""
