"""Random walks over the actions of a user: the releases of a hospital never cost more than its budget.

The hospital S0 has max_epsilon = 3 at δ = 1e-5 and one ledger for two studies; S1 is a simulated peer. The spent
budget is counted without the ledger: another accountant (dp-accounting) composes the steps of the trainers for every
release that reached a peer.
"""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import make_study, write_patches_as_bags
from test_oneshot import HEADS

from wsi_fl.federation import loop
from wsi_fl.federation.comm import LocalComm
from wsi_fl.oneshot.class_statistics import NoisyStatistics
from wsi_fl.oneshot.release_statistics import release_statistics
from wsi_fl.privacy import privacy_plan
from wsi_fl.privacy.dpsgd import DPTrainer
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.privacy.ledger_file import digest_values
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.runs.site_folder import SiteFolder
from wsi_fl.stages.runtime.console import SilentProgress
from wsi_fl.stages.site.site_data import open_store
from wsi_fl.stages.training import launch
from wsi_fl.stages.training.ranks import work_as_rank
from wsi_fl.stages.training.train import resume_run, train
from wsi_fl.stores.bag_store import BagMeta
from wsi_fl.study.folder import Study
from wsi_fl.system.tensors import load_document
from wsi_fl.types import WsiFlError

LIMIT, DELTA = 3.0, 1e-5
ORDERS = [1 + k / 10 for k in range(10, 100)] + list(range(12, 64))
METHODS = ["proxyfl", "fedavg", "fml", "cwt", "avgpush", "regular"]
SETTINGS = {
    "privacy.sigma": ["0.01", "0.5", "1.4", "4", "8", "30"],
    "privacy.delta": ["1e-5", "1e-3", "0.3"],
    "privacy.mode": ["strict", "paper"],
    "privacy.target_epsilon": ["1", "2.5", "50"],
    "privacy.clip": ["0.1", "2.0"],
    "train.epochs_per_round": ["1", "3"],
    "train.batch_size": ["4", "8", "36"],
    "train.rounds": ["1", "2", "4"],
    "audit.canaries": ["0", "12"],
}
SITE = {
    "delta = 1e-5": ["delta = 1e-3", "delta = 1e-7", ""],
    "max_epsilon = 3.0": ["max_epsilon = 1.5", ""],
    "real = true": ["real = false"],
    "ledger = ": ["# ledger = "],
}


class Nothing(Exception):
    """An action lacks an object to act on."""


class Killed(BaseException):
    """A simulated SIGKILL within the process."""


class Observed:
    """The steps taken at S0 and the releases that reached a peer."""

    def __init__(self, patch):
        self.steps, self.costs, self.sent, self.deadly, rate = [], {}, {}, None, []

        def instead(where, name):
            """Replace a function by one that receives the original."""

            def decorate(made):
                real = getattr(where, name)
                patch.setattr(where, name, lambda *args, **kwargs: made(real, *args, **kwargs))

            return decorate

        @instead(privacy_plan, "poisson_rows")
        def drawn(real, n, sample_rate, generator):
            rate[:] = [sample_rate]
            return real(n, sample_rate, generator)

        @instead(DPTrainer, "step")
        def stepped(real, trainer, *args):
            self.steps.append((trainer.sigma, rate[0]))
            return real(trainer, *args)

        @instead(loop, "_train_round")
        def trained(real, site, *args):
            self.steps = []
            self.perhaps_die()
            return real(site, *args)

        @instead(NoisyStatistics, "add_noise")
        def summed(real, sums, *args):
            self.steps = [(sums.sigma, 1.0)]
            return real(sums, *args)

        @instead(PrivacyLedger, "release")
        def released(real, ledger, round_, vector, **kwargs):
            made = real(ledger, round_, vector, **kwargs)
            self.costs[ledger.site, digest_values(vector)] = tuple(self.steps)
            return made

        @instead(LocalComm, "exchange")
        def exchanged(real, comm, outgoing, *args, **kwargs):
            self.perhaps_die()
            for item in outgoing:
                if item.sender == 0:
                    self.note(digest_values(item.release.vector))
            return real(comm, outgoing, *args, **kwargs)

        for where, name in (
            (PrivacyLedger, "record_transmission"),
            (PrivacyLedger, "record"),
            (SiteFolder, "save_checkpoint"),
            (loop, "_log_round"),
        ):

            @instead(where, name)
            def done(real, *args, **kwargs):
                result = real(*args, **kwargs)
                self.perhaps_die()
                return result

    def perhaps_die(self):
        if self.deadly is not None:
            self.deadly -= 1
            if self.deadly < 0:
                raise Killed

    def note(self, sha):
        """Record a message; a relayed mixture is not a release of the site and costs no extra budget."""
        if ("S0", sha) in self.costs:
            self.sent[sha] = self.costs["S0", sha]

    def epsilon(self):
        """Compute ε of all releases at the hospital's δ, by privacy loss distributions and by Rényi divergences.

        The former is the tightest known bound. The latter is the value of the ledger, to the four digits to which the
        two libraries agree.
        """
        dp = pytest.importorskip("dp_accounting")
        steps = Counter(step for steps in self.sent.values() for step in steps)
        found = []
        for accountant in (dp.pld.PLDAccountant(), dp.rdp.RdpAccountant(ORDERS)):
            for (sigma, rate), n in steps.items():
                accountant.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(sigma)), n)
            found.append(float(accountant.get_epsilon(DELTA)))
        return found


class Walk:
    """A user with a seed."""

    def __init__(self, root: Path, seed: int, patch):
        self.root, self.rng = root, np.random.default_rng(seed)
        self.ledger, self.backups = root / "budget" / "S0.jsonl", root / "backups"
        self.site = f'real = true\nmax_epsilon = 3.0\ndelta = 1e-5\nledger = "{self.ledger}"'
        self.did = Counter()
        for name in "AB":
            study = make_study(root / name, n_sites=2)
            write_random_features(study)
            self.write_site(study.root, self.site)
        self.observed = Observed(patch)
        patch.setattr(launch, "run_ranks", self.in_process)

    def write_site(self, study, text):
        (study / "sites" / "S0.toml").write_text(f'name = "S0"\nslides = "none"\nlabels = "none.csv"\n{text}\n')

    def in_process(self, running, arguments, **_):
        run = RunFolder(Path(arguments[1]))
        study = Study(run.path.parent.parent)
        work_as_rank(study, run, LocalComm(len(running)), SilentProgress())

    def pick(self, options):
        """Draw an item; raise `Nothing` where there is none."""
        if not len(options):
            raise Nothing
        return options[int(self.rng.integers(len(options)))]

    def some_study(self):
        return Study(self.pick(sorted(p.parent for p in self.root.glob("*/sites"))))

    def some_run(self, study):
        return self.pick(sorted(p.parent for p in study.runs_path.glob("0*/config.toml")))

    def act(self):
        name, how = self.pick(ACTS), "done"
        self.observed.deadly = int(self.rng.integers(12)) if self.rng.random() < 0.4 else None
        try:
            getattr(self, name)(self.some_study())
        except Nothing:
            how = "nothing"
        except WsiFlError as error:
            assert "\n" not in str(error)
            how = "refused"
        except Killed:
            how = "killed"
        self.did[name, how] += 1
        self.observed.deadly = None
        for file in self.root.glob("*/statistics/S0.safetensors"):
            self.observed.note(load_document(file, "release")["digest"])

    def try_something(self, study):
        self.pick([self.train, self.resume, self.release])(study)

    def train(self, study):
        keys = self.rng.permutation(sorted(SETTINGS))[: self.rng.integers(6)]
        overrides = [f"{key}={self.pick(SETTINGS[key])}" for key in keys]
        train(study, method=self.pick(METHODS), overrides=overrides)

    def resume(self, study):
        resume_run(study, self.some_run(study).name)

    def edit_run(self, study):
        run = self.some_run(study)
        config = run / "config.toml"
        before = config.read_text()
        edits = {"epochs_per_round = 1": 9, "canaries = 0": 40, "sigma = 1.4": 0.4, "batch_size = 8": 2}
        said = self.pick(list(edits))
        config.write_text(before.replace(said, f"{said.split(' = ')[0]} = {edits[said]}"))
        try:
            resume_run(study, run.name)
        finally:
            if self.rng.random() < 0.7:
                config.write_text(before)

    def rename_run(self, study):
        run = self.some_run(study)
        run.rename(run.with_name(f"{self.rng.integers(10**5):05d}-renamed"))

    def delete_run(self, study):
        shutil.rmtree(self.some_run(study))

    def release(self, study):
        overrides = [*HEADS, f"privacy.sigma={self.pick(['0.1', '6', '20'])}"]
        release_statistics(study, site="S0", repeat=bool(self.rng.random() < 0.5), overrides=overrides)

    def edit_site(self, study):
        """Try another site file, then restore the original."""
        before = self.pick(sorted(SITE))
        self.write_site(study.root, self.site.replace(before, self.pick(SITE[before])))
        try:
            self.try_something(study)
        finally:
            self.write_site(study.root, self.site)

    def back_up(self, study):
        what = self.pick([self.ledger.parent, study.root])
        if what.exists():
            shutil.copytree(what, self.backups / f"{len(list(self.backups.glob('*')))}-{what.name}")

    def restore(self, study):
        """Restore an older ledger, part of a run or study, work with it, and repair it after a refusal."""
        what = self.pick(["budget", study.root.name])
        backup = self.pick(sorted(self.backups.glob(f"*-{what}")))
        target = self.ledger.parent if what == "budget" else study.root
        newest = self.ledger.read_bytes() if self.ledger.exists() else b""
        part = self.pick(["."] if what == "budget" else [".", "runs", "stores", "statistics"])
        if (backup / part).exists():
            shutil.rmtree(target / part, ignore_errors=True)
            shutil.copytree(backup / part, target / part, dirs_exist_ok=True)
        self.try_and_put_back(study, newest)

    def damage(self, study):
        """Empty, cut or delete the ledger, try an action, then restore the newest ledger."""
        if not self.ledger.exists():
            raise Nothing
        whole = self.ledger.read_bytes()
        lines = whole.splitlines(keepends=True)
        parts = [b"", b"".join(lines[:-1]), b"".join(lines[1:]), whole[: len(whole) // 2], lines[0]]
        self.ledger.write_bytes(self.pick(parts))
        self.try_and_put_back(study, whole)

    def try_and_put_back(self, study, newest):
        """Try an action on an older backup; after a refusal require unchanged files and restore the newest backup."""
        try:
            self.try_something(study)
        finally:
            now = self.ledger.read_bytes() if self.ledger.exists() else b""
            assert now.startswith(newest) or newest.startswith(now) or len(now) <= len(newest), "written on"
            if newest and not now.startswith(newest):
                self.ledger.write_bytes(newest)

    def new_study(self, study):
        """Make a third study with the stores of another."""
        fresh = self.root / "C"
        shutil.rmtree(fresh, ignore_errors=True)
        source = self.root / self.pick("AB")
        shutil.copytree(source, fresh, ignore=shutil.ignore_patterns("runs", "statistics"))
        self.train(Study(fresh))


ACTS = (
    ["train", "resume", "restore"] * 3
    + ["edit_site", "back_up"] * 2
    + ["edit_run", "rename_run", "delete_run", "release", "damage", "new_study"]
)


def write_random_features(study):
    """Write random features of the patches of S0, for `release`."""
    with open_store(study, "S0") as store:
        meta, table = store.meta, store.table
    x = np.random.default_rng(0).normal(size=(len(table), 6)).astype(np.float32)
    known = BagMeta("S0", meta.classes, "tiny sha256:0", meta.spec, "features")
    write_patches_as_bags(study.features_path("S0"), known, table, x)


def walk(root, seed, steps, patch):
    walker, spent, n_sent = Walk(root, seed, patch), [0.0, 0.0], 0
    for number in range(steps):
        walker.act()
        if len(walker.observed.sent) > n_sent:
            n_sent, spent = len(walker.observed.sent), walker.observed.epsilon()
        assert spent[0] <= LIMIT and spent[1] <= LIMIT * (1 + 5e-4), (seed, number, spent, walker.did)
    return walker, spent[1]


def test_a_short_random_walk_never_spends_more_than_the_budget(tmp_path, monkeypatch):
    _, spent = walk(tmp_path, 1, 12, monkeypatch)
    assert spent > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_a_random_walk_of_500_steps_never_spends_more_than_the_budget(tmp_path, monkeypatch, seed):
    walker, spent = walk(tmp_path, seed, 500, monkeypatch)
    assert spent > 1.0
    assert {how for _, how in walker.did} >= {"done", "refused", "killed"}
