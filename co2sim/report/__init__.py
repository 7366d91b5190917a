"""What answers look like: terminal tables (`text`), HTML pages, charts, and the explorer."""
