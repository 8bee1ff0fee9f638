"""Generators of synthetic patches, and the methods that share them."""
