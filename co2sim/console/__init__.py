"""What the command lines share: options, tables, and how a command starts and ends."""
