"""The launcher on a Slurm cluster: a heterogeneous job from a stack file, and an agent in each of its components."""
