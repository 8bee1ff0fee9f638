"""`python -m wsi_fl` is `wsi-fl`."""

from wsi_fl.cli import main

if __name__ == "__main__":
    main()
