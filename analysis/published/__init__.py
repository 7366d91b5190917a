"""Published results beside their prediction, and the constants that are fitted to them."""
