"""FLARE's server, which refuses withdrawn certificates and ends with the process that started it."""

from __future__ import annotations

import os
import sys

from nvflare.private.fed.app.server import server_train

from wsi_fl.hospitals.flare.files import STARTED_BY
from wsi_fl.hospitals.flare.processes import end_with, find_the_way


def main() -> None:
    """Be FLARE's server, with the arguments that `server_train` takes."""
    end_with(int(os.environ[STARTED_BY]))
    find_the_way()
    server_train.version_check()
    arguments = server_train.parse_arguments()
    sys.exit(server_train.mpm.run(main_func=server_train.main, run_dir=arguments.workspace, args=arguments))


if __name__ == "__main__":
    main()
