"""An attack on our own reliability: kills, flipped bits and malformed input."""
