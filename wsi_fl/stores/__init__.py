"""HDF5 in and out; FORMAT.md in this folder is the authority on what is in the files."""
