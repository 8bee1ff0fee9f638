"""wsi-fl: hospitals learn together from whole-slide images they may not share."""

__version__ = "0.1.0"
