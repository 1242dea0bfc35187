"""Terminal agents and other tools, as npm and PyPI have them, on a scripted model."""
