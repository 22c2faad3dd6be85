"""Start and end the ranks of a job. This package knows processes, not the training that they run."""
