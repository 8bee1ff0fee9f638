"""The stages: each reads files, runs packages, writes files. They talk to each other through files alone.

One module per stage; each holds the function the command line calls, which returns its `--json` document.
"""
