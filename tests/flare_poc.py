"""NVIDIA FLARE's proof of concept: a server and clients as processes of this machine, with the filter of the ledger."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from zipfile import ZipFile

import yaml
from dp_accounting import get_epsilon_gaussian

from wsi_fl.hospitals.demo import find_free_port
from wsi_fl.privacy.ledger_file import LedgerFile

FILTER = "wsi_fl.hospitals.flare.ledger_filter.LedgerFilter"
HELLO = """
import numpy as np
import nvflare.client as flare
from nvflare.client.tracking import SummaryWriter

flare.init()
writer = SummaryWriter()
while flare.is_running():
    model = flare.receive()
    weights = model.params["numpy_key"] + 1
    metrics = {"weight_mean": float(np.mean(weights))}
    writer.add_scalar(tag="weight_mean", scalar=metrics["weight_mean"], global_step=model.current_round)
    flare.send(flare.FLModel(params={"numpy_key": weights}, metrics=metrics, current_round=model.current_round))
"""
"""Training as in FLARE's hello-numpy: it adds 1 to every weight, and sends weights and their mean."""


SITES = ("site-1", "site-2", "site-3")
SIGMA, DELTA = 4.0, 1e-5


def write_account(site, budget, sigma=SIGMA):
    return (
        f'name = "{site}"\nledger = "{site}.jsonl"\nunit = "site"\nn = 400\nclip = 5.0\nsigma = {sigma}\n'
        f"delta = {DELTA}\nmax_epsilon = {budget}\n"
    )


def exact_epsilon(rounds, sigma=SIGMA):
    return get_epsilon_gaussian(sigma / rounds**0.5, DELTA)


def privacy_json(account):
    entry = {"path": FILTER, "args": {"account": str(account)}}
    scope = {"name": "ledger", "task_data_filters": [entry], "task_result_filters": [entry]}
    return {"components": [{"id": "ledger", **entry}], "scopes": [scope], "default_scope": "ledger"}


class Poc:
    """A provisioned federation in a folder; `accounts` has the text of each site's account file."""

    def __init__(self, root: Path, accounts: dict[str, str]) -> None:
        from nvflare.tool.poc.poc_commands import prepare_poc_provision

        self.root, self.sites, self.processes, self.shift_days = root, list(accounts), {}, 0
        (root / "clock").mkdir()
        (root / "clock" / "sitecustomize.py").write_text(_CLOCK)
        project = yaml.safe_load(_PROJECT.format(port=find_free_port()))
        project["participants"] += [{"name": site, "org": "nvidia", "type": "client"} for site in accounts]
        (root / "project.yml").write_text(yaml.safe_dump(project))
        given = {"clients": [], "number_of_clients": 0, "docker_image": None}
        prepare_poc_provision(**given, workspace=str(root / "poc"), project_conf_path=str(root / "project.yml"))
        self.kits = root / "poc" / "trial" / "prod_00"
        for site, text in accounts.items():
            self.account(site).parent.mkdir()
            self.account(site).write_text(text)
            self.filter(site)

    def account(self, site: str) -> Path:
        return self.root / site / "account.toml"

    def ledger(self, site: str) -> Path:
        return self.root / site / f"{site}.jsonl"

    def charges(self, site: str) -> list:
        """Return the lines of a site's ledger that cost something, oldest first."""
        path = self.ledger(site)
        return [entry for entry in LedgerFile(path).entries if entry.mechanism] if path.exists() else []

    def filter(self, site: str) -> None:
        """Put the filter into a site's privacy.json."""
        (self.kits / site / "local" / "privacy.json").write_text(json.dumps(privacy_json(self.account(site))))

    def start(self, *names: str) -> None:
        for name in names:
            role = "server" if name == "server" else "client"
            command = [sys.executable, "-u", "-m", f"nvflare.private.fed.app.{role}.{role}_train"]
            command += ["-m", str(self.kits / name), "-s", f"fed_{role}.json", "--set", "secure_train=true"]
            command += ["org=nvidia", "config_folder=config", *([] if name == "server" else [f"uid={name}"])]
            env = os.environ | {"XDG_STATE_HOME": str(self.root / "state" / name), "OMP_NUM_THREADS": "1"}
            if self.shift_days:
                env |= {"PYTHONPATH": str(self.root / "clock"), "SHIFT_DAYS": str(self.shift_days)}
            with (self.root / f"{name}.log").open("a") as log:
                self.processes[name] = subprocess.Popen(
                    command, stdout=log, stderr=log, env=env, cwd=self.kits / name, start_new_session=True
                )

    def stop(self, *names: str) -> None:
        """Kill processes with those of their jobs, which are in the same session."""
        for name in names:
            process = self.processes.pop(name)
            for pid in [process.pid, *self.job_processes(name)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
            process.wait()

    def job_processes(self, name: str) -> list[int]:
        """Return the processes of jobs at a site, or at the server."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(self.kits / name).encode() in words and any(
                b"worker_process" in w or b"runner_process" in w for w in words
            ):
                found.append(int(folder.name))
        return found

    @contextmanager
    def running(self):
        try:
            self.start("server")
            time.sleep(6)
            self.start(*self.sites)
            yield self
        finally:
            self.stop(*list(self.processes))

    @contextmanager
    def session(self):
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        session = new_secure_session("admin@nvidia.com", str(self.kits / "admin@nvidia.com"), timeout=60)
        try:
            yield session
        finally:
            session.close()

    def write_job(self, rounds: int, script: str = HELLO, name: str = "hello", **given) -> Path:
        """Write a job as FLARE's recipe makes it."""
        from nvflare.app_common.np.recipes import NumpyFedAvgRecipe

        folder = self.root / "jobs"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}_client.py").write_text(script)
        recipe = NumpyFedAvgRecipe(
            name=name,
            model=given.pop("model", [0.0] * 10),
            min_clients=len(self.sites),
            num_rounds=rounds,
            train_script=str(folder / f"{name}_client.py"),
            **given,
        )
        recipe.export(str(folder))
        return folder / name

    def submit(self, job: Path) -> str:
        """Submit a job once all sites are connected; return its id."""
        with self.session() as session:
            deadline = time.monotonic() + 90
            while len(session.get_connected_client_list()) < len(self.sites):
                assert time.monotonic() < deadline, "the clients did not connect"
                time.sleep(1)
            return session.submit_job(str(job))

    def status(self, job: str) -> str:
        with self.session() as session:
            return str(session.get_job_meta(job)["status"])

    def wait(self, job: str, limit_s: float = 240) -> str:
        """Wait until a job has ended; return its status."""
        deadline = time.monotonic() + limit_s
        with self.session() as session:
            while not (status := str(session.get_job_meta(job)["status"])).startswith("FINISHED"):
                assert time.monotonic() < deadline, f"job {job} is {status}"
                time.sleep(1)
        return status

    def round_metrics(self, job: str) -> list[dict]:
        """Return the metrics of each round that FLARE's server wrote for a job."""
        with ZipFile(self.root / "poc" / "jobs-storage" / job / "workspace") as archive:
            names = [name for name in archive.namelist() if name.endswith("round_metrics.jsonl")]
            return [json.loads(line) for name in names for line in archive.read(name).decode().splitlines()]

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text()


_CLOCK = """
import datetime, os
import wsi_fl.privacy.ledger as ledger


class Later(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.now(tz) + datetime.timedelta(days=int(os.environ["SHIFT_DAYS"]))


ledger.datetime = Later
"""
"""Moves the clock of a site's ledger; `datetime` in its module is the only clock that a ledger reads."""

_PROJECT = """
api_version: 3
name: trial
builders:
- {{path: nvflare.lighter.impl.workspace.WorkspaceBuilder, args: {{template_file: [master_template.yml]}}}}
- {{path: nvflare.lighter.impl.static_file.StaticFileBuilder, args: {{config_folder: config}}}}
- {{path: nvflare.lighter.impl.cert.CertBuilder}}
- {{path: nvflare.lighter.impl.signature.SignatureBuilder}}
participants:
- {{default_host: localhost, fed_learn_port: {port}, name: server, org: nvidia, type: server}}
- {{name: admin@nvidia.com, org: nvidia, role: project_admin, type: admin}}
"""
