"""A test bed of hospitals as processes of this machine, each with its kit, study and store."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from conftest import make_study, write_features
from open_tracing import Opened

from wsi_fl import plugins
from wsi_fl.hospitals.demo import find_free_port
from wsi_fl.hospitals.plans import installed_code
from wsi_fl.hospitals.plans.build_plan import make_plan
from wsi_fl.hospitals.plans.preapproval import write_preapproval
from wsi_fl.hospitals.plans.preapproval_check import make_preapproval
from wsi_fl.hospitals.plans.review import review_plan, sign_plan
from wsi_fl.hospitals.plans.signed_plan import FederationPlan, plan_path
from wsi_fl.hospitals.trust import certificates
from wsi_fl.hospitals.trust.certificates import build_request, issue_certificate
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.hospitals.trust.provisioning import provision_federation
from wsi_fl.hospitals.trust.root_ca import RootCA
from wsi_fl.stages.training.train import train
from wsi_fl.study.folder import Study
from wsi_fl.system.files import read_lines
from wsi_fl.types import UNLABELLED

INSECURE = ("privacy.insecure_seed=1", "train.seed=3")
SITES, BASE = ("S0", "S1", "S2"), ("train.rounds=3", "privacy.sigma=4", "comm.timeout_s=150")
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
    """A federation of hospitals S0, S1, … in one folder; each hospital's visible files are in a subfolder.

    Args:
        folder: the one that all share, if no server connects them.
        furnish: called with the study of all hospitals, a site and its index, to write the site's files.
        whole: that study, if it is not the usual one.

    Attributes:
        jobs: of the hospitals over a folder, as `folder_hospitals` takes them.
    """

    def __init__(self, root, n=2, *, folder=None, server=None, extra="", furnish=None, whole=None) -> None:
        if whole is None:
            whole = make_study(root / "whole", n, extra)
            for k in range(n if furnish else 0):
                furnish(whole, f"S{k}", k)
        self.root, self.sites, self.pipeline = root, whole.site_names(), whole.pipeline_name(None)
        self.simulated, self.share = whole.root, folder and Path(folder)
        if folder:
            self.share.mkdir(exist_ok=True)
        server = None if folder else server or f"localhost:{find_free_port()}"
        provision_federation(root / "kits", federation="trial", server=server, shared_folder=folder, sites=self.sites)
        for site in self.sites:
            others = [name for name in self.sites if name != site]
            shutil.copytree(whole.root, root / site, ignore=shutil.ignore_patterns(*others, "data.npz"))
            for file in (root / site / "sites").glob("*.toml"):
                file.write_text(file.read_text().replace("real = false", ALLOWED))
        self.jobs = [{"study": str(root / site), "kit": str(root / "kits" / site)} for site in self.sites]
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

    def preapprove(self, site: str, plan: FederationPlan) -> None:
        """Let a hospital sign a standing approval of one run of plans like this one."""
        study, limits = self.study(site), {"epsilon": None, "until": "2099-01-31", "runs": 1}
        write_preapproval(study, make_preapproval(study, plan, site, **limits), self.kit(site).load_identity())

    def write_ended_certificates(self) -> None:
        """Put a certificate that ended yesterday next to each hospital's."""
        root = RootCA.open(self.root / "kits")
        for site in self.sites:
            startup = self.root / "kits" / site / "startup"
            asked = build_request((startup / "client.key").read_text(), site, "org")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(certificates, "datetime", Earlier)
                ended = issue_certificate(asked, root.key, root.certificate, role="hospital", days=99)
            (startup / "ended.crt").write_text(ended)

    def locally(self, method: str, *settings: str) -> dict[str, object]:
        """Run the same settings in one process; return its summary."""
        given = {"pipeline_name": self.pipeline, "backend": "local"}
        return train(Study(self.simulated), method=method, overrides=[*INSECURE, *settings], **given)

    def require_the_same(self, method: str, *settings: str) -> dict[str, object]:
        """Require the models and charges of one process in the only run of each site; return its summary."""
        summary, whole = self.locally(method, *settings), Study(self.simulated)
        for site in self.sites:
            assert digests(self.run(site), site) == digests(whole.root / summary["run"], site) != {}
            assert charged(self.study(site), site) == charged(whole, site)
        return summary

    def work(self) -> dict[str, object]:
        """Run the signed plan, over the folder or FLARE, and return the summary."""
        if self.share:
            start(self.root, [self.jobs])
            summary, *_ = map(self.result, self.sites)
            return summary
        with self.running():
            said = self.submit("--plan", self.plan_file())
        assert said.returncode == 0, said.stderr
        return json.loads(said.stdout)

    def result(self, site: str) -> dict[str, object]:
        """Return the summary of a hospital over a folder."""
        document = json.loads((self.root / site / "result.json").read_text())
        assert "error" not in document, (document, (self.root / site / "stderr.txt").read_text()[-3000:])
        return document["summary"]

    def run(self, site: str) -> Path:
        """Return the folder of a site's only run."""
        (path,) = (self.root / site / "runs").glob("0*")
        return path

    @contextmanager
    def running(self, *names: str, watched: bool = False):
        """Start `federation start` for sites; yield once all are registered, and stop them at the end."""
        try:
            for name in names or ("server", *self.sites):
                self.start(name, watched=watched)
            yield self
        finally:
            self.stop(*self.processes)

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

    def stop(self, *names: str) -> None:
        """Stop hospitals or the server, all at the same time."""
        for name in names:
            self.processes[name].terminate()
        for process in map(self.processes.pop, names):
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

    def pids(self, name: str, what: str = "") -> list[int]:
        """Return all processes of a hospital or the server, or some by their command line."""
        text = f"{what}.*{self.root / 'kits' / name}( |/|$)"
        found = subprocess.run(["pgrep", "-f", "--", text], capture_output=True, check=False, text=True)
        return [int(word) for word in found.stdout.split()]

    def job_processes(self, site: str) -> list[int]:
        """Return the job processes that a hospital's FLARE client started."""
        return self.pids(site, "flare.processes job")

    def wait_for(self, what, seconds: float = 60.0):
        deadline = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < deadline, "nothing came of it"
            time.sleep(0.05)
        return found

    def kill_job(self, site: str, sign: int = signal.SIGKILL) -> None:
        send(self.wait_for(lambda: self.job_processes(site)), sign)

    def kill(self, name: str) -> None:
        """Kill all processes of a hospital or the server."""
        send(self.pids(name), signal.SIGKILL)
        self.processes.pop(name).wait()


def send(pids: list[int], sign: int) -> None:
    """Send a signal to processes that may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, sign)


class Earlier(datetime):
    """A clock a hundred days behind."""

    @classmethod
    def now(cls, zone=None):
        return datetime.now(zone) - timedelta(days=100)


def start(root: Path, groups: list[object]) -> object:
    """Let groups of hospitals over a folder work, one after another."""
    (root / "jobs.json").write_text(json.dumps(groups))
    command = [sys.executable, str(Path(__file__).with_name("folder_hospitals.py")), str(root / "jobs.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout or "null")


def charged(study: Study, site: str) -> list[tuple[int, dict[str, object]]]:
    """Return (round, mechanism) of all charges on a ledger, in order."""
    return [(line["round"], line["mechanism"]) for line in read_lines(study.ledger_path(site)) if line.get("mechanism")]


def heads(study: Study, site: str, k: int) -> None:
    """Write features of three hospitals, and of a fourth inference-only site."""
    from test_oneshot import rows_of

    x, labels = rows_of(40, k, (0.0, 1.0, 0.5, 0.5)[k])
    patients = [f"p{i // 3}" for i in range(40)]
    if k < 3:
        write_features(study, site, x, labels, patients, ["train"] * 30 + ["test"] * 10)
        return
    with (study.root / "sites" / f"{site}.toml").open("a") as file:
        file.write('role = "receiver"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("conftest.CLASSES", UNLABELLED)
        write_features(study, site, x, np.zeros(40, int), patients, ["train"] * 40)


def digests(run: Path, site: str) -> dict[str, str]:
    """Return the SHA-256 of each model of a run at a site."""
    files = [run / "sites" / site / f"{role}.safetensors" for role in ("private", "proxy", "shared")]
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in files if path.exists()}
