"""Slides and what lies over them, as pages and tiles for a browser on this machine."""
