"""HDF5 files of stores, specified in FORMAT.md in this folder."""
