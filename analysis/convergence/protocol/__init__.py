"""The protocol of `co2analysis verify`: what is measured, and how it is judged."""
