"""Execute a schedule on the ranks that are there."""
