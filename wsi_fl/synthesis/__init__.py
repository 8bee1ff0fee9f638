"""Generators of shareable synthetic images. Empty in this release; `synthesize` will fill it."""
