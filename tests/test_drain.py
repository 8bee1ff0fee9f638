"""A hospital that lies makes others release a sum no oftener than their people approved."""

import json

from tests.test_folder_line import SITES, Group, plan_of, start
from tests.test_oneshot import HEADS
from wsi_fl.privacy.accounting import epsilon
from wsi_fl.privacy.book import Book
from wsi_fl.privacy.rounds import applied
from wsi_fl.privacy.terms import MOST_ATTEMPTS
from wsi_fl.stages.hospitals.plans.signed import approve

HONEST, LIAR = SITES[:2], SITES[2]
SHARED = [*HEADS, "privacy.noise=shared", "privacy.sigma=9", "comm.timeout_s=60"]


class Turns(Group):
    """Hospitals whose processes cron starts again and again."""

    def turns(self, *lies):
        """The last hospital waits when the others are started, and lies as it is told."""
        groups = []
        for lie in lies:
            jobs = [job | {"after": LIAR, "leaving_s": 0.0} for job in self.jobs[:2]]
            groups.append([*jobs, self.jobs[2] | ({"lies": lie} if lie else {})])
        start(self.root, [type("", (), {"jobs": jobs}) for jobs in groups])

    def approve(self, federation, *sites):
        for site in sites:
            approve(self.study(site), self.plan, federation.identity(site))

    @property
    def plan(self):
        return plan_of(self.study("S0"), self.method, self.overrides)

    def charges(self, site):
        """How often a site was charged under each approval, the oldest first."""
        entries = Book(self.study(site).ledger(site)).entries
        found = [e.approved for e in entries if e.mechanism]
        return [found.count(one) for one in dict.fromkeys(found)]

    def epsilon(self, site):
        return epsilon(applied(Book(self.study(site).ledger(site)).entries), 1e-5)

    def told(self, site):
        return json.loads((self.root / site / "result.json").read_text())


def test_twenty_turns_of_a_liar_cost_no_more_than_was_approved(tmp_path, federation):
    (tmp_path / "share").mkdir()
    group = Turns(tmp_path / "hospitals", "oneshot", SHARED, federation, tmp_path / "share")
    group.turns(*["spoils"] * 6)
    for site in HONEST:
        assert group.charges(site) == [MOST_ATTEMPTS]
    assert any("let its people approve the plan again" in group.told(s)["error"] for s in HONEST)
    once = group.epsilon("S0")
    group.approve(federation, *SITES)
    group.turns("")
    metrics = {s: (group.run(s) / "sites" / s / "metrics.jsonl").read_bytes() for s in HONEST}
    group.turns(*["begins again"] * 13)
    for site in HONEST:
        assert group.charges(site) == [MOST_ATTEMPTS, 1]
        assert group.told(site)["summary"]["lost"] == []
        assert (group.run(site) / "sites" / site / "metrics.jsonl").read_bytes() == metrics[site]
    assert once < group.epsilon("S0") < 2 * once
