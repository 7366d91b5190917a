"""One HTML page about a study, with everything inside: `study` says what of, `page` makes it."""
