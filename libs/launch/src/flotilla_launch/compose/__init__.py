"""The launcher of containers on this host: a Compose file from a stack file, and Docker that keeps it up."""
