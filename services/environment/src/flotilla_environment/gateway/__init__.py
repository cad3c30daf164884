"""The gateway: agents that were written for the endpoint of a vendor ask for their turns here."""
