"""Hospitals that learn together over a server or a folder: kits, plans, letters, and the lines that carry them."""
