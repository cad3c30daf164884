"""Rows of data sets, whatever the format of their files, and the samples that runs write."""
