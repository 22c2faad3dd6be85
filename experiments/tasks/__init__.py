"""What is trained: models built from numbers, and data that is on every machine."""
