"""Language models that score samples."""
