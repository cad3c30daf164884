"""Who has which service: gangs and generators belong to one run at a time, reward replicas to all."""
