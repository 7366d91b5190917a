"""Start ranks, on this machine or in a lab, and watch them."""
