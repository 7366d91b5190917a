"""Published results: their prediction, its errors, and the constants that are fitted to them."""
