"""Tables and sentences of answers for a terminal."""
