"""One job, from its command line to its ranks and their reports."""
