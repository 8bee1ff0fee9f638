"""Workflows that clients control (swarm, cyclic) get releases from their learners, and all others are refused."""

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian

from wsi_fl.privacy.ledger_file import LedgerFile

pytest.importorskip("nvflare")
from crash_release import call_filter, make_context
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.executor import Executor
from nvflare.apis.filter import ContentBlockedException, FilterChainType
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.ccwf.client_controller_executor import ClientControllerExecutor
from nvflare.app_common.ccwf.comps.np_file_model_persistor import NPFileModelPersistor
from nvflare.app_common.ccwf.cse_client_ctl import CrossSiteEvalClientController
from nvflare.app_common.ccwf.cyclic_client_ctl import CyclicClientController
from nvflare.app_common.ccwf.swarm_client_ctl import SwarmClientController
from nvflare.app_common.np.np_model_persistor import NPModelPersistor
from nvflare.edge.executors.hug import HierarchicalUpdateGatherer

from wsi_fl.hospitals.flare.ledger_filter import _PERSISTORS, LedgerFilter

BASE = {"w": np.zeros((2, 3), np.float32), "b": np.ones(2)}
WORKFLOWS = [SwarmClientController, CyclicClientController]


class Learner(Executor):
    """Adds 1000 to every weight, unless it is told what to answer."""

    def __init__(self, answer=None):
        super().__init__()
        self.answer = answer

    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        moved = {name: value + 1000 for name, value in from_shareable(shareable).data.items()}
        return self.answer or DXO(DataKind.WEIGHTS, moved, {"initial_metrics": {"accuracy": 0.7}}).to_shareable()


class OwnSwarm(SwarmClientController):
    pass


class OwnPersistor(NPModelPersistor):
    pass


@pytest.fixture
def account(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "C1.toml"
    path.write_text(
        'name = "C1"\nledger = "C1.jsonl"\nunit = "site"\nn = 400\nclip = 2.0\nsigma = 4.0\ndelta = 1e-5\n'
        "max_epsilon = 1.5\n"
    )
    return path


def charged_tasks(account):
    path = account.with_suffix(".jsonl")
    return [entry.task for entry in LedgerFile(path).entries if entry.mechanism] if path.exists() else []


def make_workflow(kind=SwarmClientController, answer=None):
    workflow = kind()
    workflow.learn_executor, workflow.workflow_id = Learner(answer), "controller"
    return workflow


def pass_message(ledger_filter, workflow, chain, message, task="t1", **given):
    given = {"persistor": NPModelPersistor()} | given
    return call_filter(ledger_filter, chain, message, make_context(ledger_filter, "job-a", task, workflow, **given))


def configure(account, workflow, **given):
    """Pass a workflow's first task, which has no model, through the filter."""
    ledger_filter = LedgerFilter(str(account))
    task = Shareable({"cwf.config": {}})
    assert pass_message(ledger_filter, workflow, FilterChainType.TASK_DATA_CHAIN, task, **given) is task
    return ledger_filter


def learn(ledger_filter, workflow, round_, base=BASE):
    """Return what a workflow gets from its learner, as FLARE's controllers ask for it."""
    task = DXO(DataKind.WEIGHTS, dict(base)).to_shareable()
    task.set_header("current_round", round_)
    return workflow.execute_learn_task(task, make_context(ledger_filter, "job-a", None, workflow), Signal())


@pytest.mark.parametrize("kind", WORKFLOWS)
def test_a_learner_s_result_is_a_release_before_its_workflow_has_it(account, monkeypatch, kind):
    from wsi_fl.privacy import model_updates

    workflow = make_workflow(kind)
    ledger_filter = configure(account, workflow)
    first = from_shareable(learn(ledger_filter, workflow, 0))
    assert first.meta["wsi_fl_privacy"]["epsilon"] == pytest.approx(get_epsilon_gaussian(4.0, 1e-5), abs=1e-6)
    assert set(first.meta["initial_metrics"]) == {"epsilon"}
    monkeypatch.setattr(model_updates.CipherStream, "draw_normal", lambda self, n: np.zeros(n))
    again = from_shareable(learn(ledger_filter, workflow, 0))  # the same round: the same bytes
    assert again.data["w"].tolist() == first.data["w"].tolist()
    second = learn(ledger_filter, workflow, 1)
    assert second.get_header("current_round") == 1
    moved = np.concatenate([(from_shareable(second).data[name] - BASE[name]).ravel() for name in BASE])
    assert np.linalg.norm(moved) == pytest.approx(2.0, rel=1e-6)
    assert charged_tasks(account) == ["controller, round 0", "controller, round 1"]
    refused = learn(ledger_filter, workflow, 2)  # above max_epsilon
    assert refused.get_return_code() == "TASK_RESULT_FILTER_ERROR" and "DXO" not in refused
    assert len(charged_tasks(account)) == 2


def test_the_workflow_s_own_answers_leave_as_a_code(account):
    workflow = make_workflow()
    ledger_filter = configure(account, workflow)
    learner = workflow.learn_executor
    configure(account, workflow)  # the next task: the learner is not wrapped twice
    assert workflow.learn_executor is learner
    reply = make_reply("OK", {"said": "patient 17"})
    reply["weights"] = BASE
    answer = pass_message(ledger_filter, workflow, FilterChainType.TASK_RESULT_CHAIN, reply)
    assert answer.get_return_code() == "OK" and "patient 17" not in str(answer) and "weights" not in answer
    learn(ledger_filter, workflow, 0)
    assert len(charged_tasks(account)) == 1


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (make_reply("TASK_ABORTED"), "TASK_ABORTED"),
        (make_reply("patient 17"), "EXECUTION_EXCEPTION"),
        (DXO(DataKind.METRICS, {"accuracy": 0.7}).to_shareable(), "TASK_RESULT_FILTER_ERROR"),
        (Shareable({"weights": BASE}), "TASK_RESULT_FILTER_ERROR"),
        (DXO(DataKind.COLLECTION, {"w": DXO(DataKind.WEIGHTS, BASE)}).to_shareable(), "TASK_RESULT_FILTER_ERROR"),
    ],
)
def test_a_learner_that_fails_or_returns_no_model_gives_the_workflow_a_code_alone(account, answer, code):
    workflow = make_workflow(answer=answer)
    got = learn(configure(account, workflow), workflow, 0)
    assert got.get_return_code() == code and set(got) == {"__headers__"} and "patient 17" not in str(got)
    assert not charged_tasks(account)


def refuse(account, workflow, *words, **given):
    with pytest.raises(ContentBlockedException) as caught:
        configure(account, workflow, **given)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value), caught.value


@pytest.mark.parametrize(
    "workflow",
    [
        make_workflow(OwnSwarm),
        CrossSiteEvalClientController(),
        ClientControllerExecutor(["controller"]),
        HierarchicalUpdateGatherer("learner", "updater", 1.0),
        SwarmClientController(),  # without a learner
    ],
    ids=lambda workflow: type(workflow).__name__,
)
def test_a_workflow_that_sends_past_the_filter_is_refused_before_it_begins(account, workflow):
    refuse(account, workflow, f"{type(workflow).__name__} sends results past the filters", "only FLARE's own swarm")


def test_a_workflow_as_the_learner_of_a_workflow_is_refused(account):
    workflow = make_workflow()
    workflow.learn_executor = make_workflow()
    refuse(account, workflow, "sends results past the filters")


@pytest.mark.parametrize("key", ["source_ckpt_file_full_name", "ckpt_preload_path"])
def test_a_workflow_begins_with_no_model_file_but_one_of_the_job(account, tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    app = tmp_path / "app"
    (app / "custom").mkdir(parents=True)
    for folder in (app, app / "custom"):
        (folder / "link.pt").symlink_to(tmp_path / "ours.pt")
    stand_in = type("PTFileModelPersistor", (), {"__module__": "nvflare.app_opt.pt.file_model_persistor"})()
    for persistor in (NPModelPersistor(), NPFileModelPersistor(), stand_in):
        for path in ("start.pt", str(app / "model.pt"), None):  # brought by the job
            setattr(persistor, key, path)
            configure(account, make_workflow(), persistor=persistor)
        for path in (str(tmp_path / "ours.pt"), "../../ours.pt", "link.pt"):
            setattr(persistor, key, path)
            words = f"would send this site's {path} as its first model"
            refuse(account, make_workflow(), words, persistor=persistor)


@pytest.mark.parametrize("persistor", [OwnPersistor(), type("Other", (), {})(), None], ids=lambda it: type(it).__name__)
def test_a_workflow_with_another_persistor_is_refused(account, persistor):
    words = f"{type(persistor).__name__} may send a file of this site as the first model; use one of NPFileModel"
    refuse(account, make_workflow(), words, persistor=persistor)


def test_the_persistors_that_pass_are_flare_s():
    from nvflare.app_opt.pt.file_model_persistor import PTFileModelPersistor

    classes = NPFileModelPersistor, NPModelPersistor, PTFileModelPersistor
    assert tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in classes) == _PERSISTORS


def test_a_workflow_needs_the_filter_at_all_three_places(account):
    refuse(account, make_workflow(), "among its task result filters", result_filter=False)
    with pytest.raises(ContentBlockedException, match="among the task data filters"):
        pass_message(LedgerFilter(str(account)), make_workflow(), FilterChainType.TASK_RESULT_CHAIN, make_reply("OK"))


def test_a_task_of_another_client_for_a_learner_itself_is_refused(account):
    """Such a task has no id, so a second one could not be told from the first asked for again."""
    task = DXO(DataKind.WEIGHTS, dict(BASE)).to_shareable()
    with pytest.raises(ContentBlockedException, match="comes from another client"):
        pass_message(LedgerFilter(str(account)), Learner(), FilterChainType.TASK_DATA_CHAIN, task, task=None)


def test_a_refusal_is_one_line_in_the_log(account, monkeypatch):
    lines = []
    monkeypatch.setattr(LedgerFilter, "log_error", lambda self, context, text: lines.append(text))
    workflow = make_workflow(answer=DXO(DataKind.METRICS, {"accuracy": 0.7}).to_shareable())
    learn(configure(account, workflow), workflow, 0)
    assert lines == ["nothing leaves this site: this result is METRICS, and only WEIGHTS and WEIGHT_DIFF pass"]
