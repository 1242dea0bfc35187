"""Models in memory: leased by name, loaded once, and who gives way to whom."""
