"""The jail: code that nobody vouches for runs in it, with no way to what it was not given."""
