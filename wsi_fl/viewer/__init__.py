"""A viewer of slides with layers in a browser on this machine."""
