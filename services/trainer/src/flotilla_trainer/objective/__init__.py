"""The objectives of sessions, as the front applies them: each turns an update into the columns that the ranks need.

Nothing here loads torch: whatever needs the whole update is computed in numpy, and travels as a number a token.
"""
