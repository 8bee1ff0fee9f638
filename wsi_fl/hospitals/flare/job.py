"""The process of a job at a hospital: FLARE's, which checks the server's name and ends with the client."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.private.fed.app.client import worker_process

from wsi_fl.hospitals.flare.files import JOB, STARTED_BY
from wsi_fl.hospitals.flare.processes import end_with, find_the_way


class Launcher(ClientProcessJobLauncher):  # type: ignore[misc]
    """Starts this module where FLARE would start its own."""

    def get_command(self, job_meta: Any, fl_ctx: Any) -> str:
        """Return FLARE's command line, with this module in it."""
        theirs, module = str(super().get_command(job_meta, fl_ctx)), f"-m {worker_process.__name__} "
        if module not in theirs:
            raise RuntimeError("this NVIDIA FLARE starts jobs in another way; wsi-fl needs version 2.9")
        return theirs.replace(module, f"-m {JOB} ")


def main() -> None:
    """Be the process of a job, with the arguments that FLARE's takes."""
    end_with(int(os.environ[STARTED_BY]))
    find_the_way()
    arguments = worker_process.parse_arguments()
    place = str(Path(arguments.workspace, arguments.job_id))
    sys.exit(worker_process.mpm.run(main_func=worker_process.main, run_dir=place, args=arguments))


if __name__ == "__main__":
    main()
