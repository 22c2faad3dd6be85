"""Training tasks: models built from numbers, and data that is on every machine."""
