"""What a run optimises, as the front knows it: checked sections, and the columns that the ranks need of an update.

Nothing here loads torch: whatever needs the whole update is computed in numpy, and travels as a number a token.
"""
