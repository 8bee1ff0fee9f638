"""Attacks on ourselves: kills, flipped bits and malformed input on reliability, and one on the noise of privacy."""
