"""What can be configured: the schema, its checks, and complaints of one line with the full key."""
