"""What part of the time training gets on with its work where parts fail."""
