"""Runs the nodes of a stack on a Ray cluster, as actors in placement groups. Ray is imported in functions only."""
