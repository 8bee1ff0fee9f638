"""A test bed of hospitals as processes of this machine, each with its kit, study and store."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

import pytest
from conftest import make_study
from open_tracing import Opened

from wsi_fl import plugins
from wsi_fl.hospitals.demo import find_free_port
from wsi_fl.hospitals.plans import installed_code
from wsi_fl.hospitals.plans.build_plan import make_plan
from wsi_fl.hospitals.plans.review import review_plan, sign_plan
from wsi_fl.hospitals.plans.signed_plan import FederationPlan, plan_path
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.hospitals.trust.provisioning import provision_federation
from wsi_fl.hospitals.trust.root_ca import RootCA
from wsi_fl.stages.training.train import train
from wsi_fl.study.folder import Study

INSECURE = ("privacy.insecure_seed=1", "train.seed=3")
FEDERATION = [sys.executable, "-m", "wsi_fl", "federation"]
ALLOWED = 'real = true\nmax_epsilon = 50.0\ndelta = 1e-5\nallow = ["model", "buffer", "generator", "shared"]'


@pytest.fixture(scope="module", autouse=True)
def one_installation():
    """Read the installed packages, and the code of each method, once for all tests of a file that imports this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "plugin_versions", cache(plugins.plugin_versions))
        patch.setattr(installed_code, "code_digest", cache(installed_code.code_digest))
        yield


class Bed:
    """A federation of hospitals S0, S1, … in one folder; each hospital's visible files are in a subfolder."""

    def __init__(self, root, n=2, *, folder=None, server=None, extra="", furnish=None, whole=None) -> None:
        if whole is None:
            whole = make_study(root / "whole", n, extra)
            for k in range(n if furnish else 0):
                furnish(whole, f"S{k}", k)
        self.root, self.sites, self.pipeline = root, whole.site_names(), whole.pipeline_name(None)
        server = None if folder else server or f"localhost:{find_free_port()}"
        provision_federation(root / "kits", federation="trial", server=server, shared_folder=folder, sites=self.sites)
        for site in self.sites:
            others = [name for name in self.sites if name != site]
            shutil.copytree(whole.root, root / site, ignore=shutil.ignore_patterns(*others, "data.npz"))
            for file in (root / site / "sites").glob("*.toml"):
                file.write_text(file.read_text().replace("real = false", ALLOWED))
        self.simulated = whole.root
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.opened = Opened(root / "opened")

    def kit(self, name: str) -> Kit:
        return Kit.open(self.root / "kits" / name)

    def study(self, site: str) -> Study:
        return Study(self.root / site)

    def sign(self, method: str, *settings: str, by: list[str] | None = None) -> FederationPlan:
        """Write a plan for the pipeline of the tests, signed by all hospitals."""
        keys = RootCA.open(self.root / "kits").load_keys()
        given = {"pipeline_name": self.pipeline, "overrides": [*INSECURE, *settings], "keys": keys}
        plan = make_plan(self.study(self.sites[0]), method=method, out=self.root / "plan.json", **given)
        for site in by or self.sites:
            looked = review_plan(self.study(site), plan, site)
            sign_plan(self.study(site), looked, self.kit(site).load_identity())
        return plan

    def locally(self, method: str, *settings: str) -> dict[str, str]:
        """Run the same settings in one process; return the digests of each site's models."""
        study, given = Study(self.simulated), {"pipeline_name": self.pipeline, "backend": "local"}
        summary = train(study, method=method, overrides=[*INSECURE, *settings], **given)
        return {site: digests(study.root / summary["run"], site) for site in self.sites}

    @contextmanager
    def running(self, *names: str, watched: bool = False):
        """Start `federation start` for sites; yield once all are registered, and stop them at the end."""
        try:
            for name in names or ("server", *self.sites):
                self.start(name, watched=watched)
            yield self
        finally:
            for name in list(self.processes):
                self.stop(name)

    def start(self, name, wait=True, watched=False, file_limit=None, env=MappingProxyType({})):
        place = [] if name == "server" else ["--study", str(self.root / name)]
        command = [*FEDERATION, "start", str(self.root / "kits" / name), *place]
        command = self.opened.watched(name, command) if watched else command
        given = {"cwd": self.root, "env": os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | env}
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command, **given, **out)
        if file_limit is not None:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (file_limit, file_limit))
        self.processes[name] = process
        if wait:
            line = process.stdout.readline()
            assert "Ctrl-C ends it" in line, line + process.stdout.read()
        return process

    def strangers(self, name: str) -> list[Path]:
        """Return the files of others that the processes of a hospital or the server opened or tried to open."""
        own = [self.root / "kits" / name, self.root / name, self.opened.folder]
        return self.opened.below(self.root, name, but=own)

    def stop(self, name: str) -> None:
        process = self.processes.pop(name)
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        process.stdout.close()

    def commanding(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command and return its process."""
        given = {"cwd": self.root / self.sites[0], "env": os.environ | {"COLUMNS": "200"}, "text": True}
        command = [*FEDERATION, *map(str, arguments)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **given)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        process = self.commanding(*arguments)
        said = process.communicate()
        return subprocess.CompletedProcess(arguments, process.returncode, *said)

    def submitting(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a submission and return its process."""
        return self.commanding("submit", "--kit", self.root / "kits" / "coordinator", "--json", *arguments)

    def submit(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.command("submit", "--kit", self.root / "kits" / "coordinator", "--json", *arguments)

    def plan_file(self) -> str:
        """Return the path of a signed plan at the first hospital."""
        return str(plan_path(self.study(self.sites[0])))

    def rounds(self, site: str, run: str) -> int:
        """Return the number of rounds completed by a site."""
        path = self.root / site / "runs" / run / "sites" / site / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def job_processes(self, site: str) -> list[int]:
        """Return the job processes that a hospital's FLARE client started."""
        kit, found = str(self.root / "kits" / site), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue
                if "flare.processes job" in text and kit in text:
                    found.append(int(entry.name))
        return found

    def wait_for(self, what, seconds: float = 60.0):
        deadline = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < deadline, "nothing came of it"
            time.sleep(0.05)
        return found

    def kill_job(self, site: str, sign: int = signal.SIGKILL) -> None:
        for pid in self.wait_for(lambda: self.job_processes(site)):
            os.kill(pid, sign)


class Earlier(datetime):
    """A clock a hundred days behind."""

    @classmethod
    def now(cls, zone=None):
        return datetime.now(zone) - timedelta(days=100)


def digests(run: Path, site: str) -> dict[str, str]:
    """Return the SHA-256 of each model of a run at a site."""
    files = [run / "sites" / site / f"{role}.safetensors" for role in ("private", "proxy", "shared")]
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in files if path.exists()}
