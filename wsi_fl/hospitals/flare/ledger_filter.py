"""Filter for any job of NVIDIA FLARE: what it sends is clipped, noised, and charged to the hospital's own ledger.

A site's `local/privacy.json` names it three times. As task data filter it stores the weights that a task begins with,
as task result filter it releases what training changed, and as component it stops the job's events, such as its
metrics, which pass no filter. In swarm and cyclic learning, where FLARE filters no result of a learner, the workflow
gets releases from its learner. See docs/how-to/other-federations.md. The names of this module and its class are in
files at hospitals; keep them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.filter import ContentBlockedException, Filter, FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import EventScope, FedEventHeader, FilterKey, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.ccwf import CyclicClientController, SwarmClientController
from nvflare.app_common.ccwf.client_controller_executor import ClientControllerExecutor
from nvflare.app_common.ccwf.client_ctl import ClientSideController
from nvflare.edge.executors.hug import HierarchicalUpdateGatherer

from wsi_fl.privacy.model_updates import UpdateRelease, UpdateTerms, describe_release, release_update
from wsi_fl.study.account_file import load_account
from wsi_fl.types import WsiFlError, single_line

UNIT_KEY = "privacy_unit"
"""Key of a result's meta by which a job says that its update has a row for each patient: "patient"."""
METRICS_KEY = "wsi_fl_privacy"
"""Key of a result's meta with the price of a release."""
_BASE_KEY = "wsi_fl_base"
_ROUND_HEADERS = (AppConstants.CURRENT_ROUND, AppConstants.START_ROUND, AppConstants.NUM_ROUNDS)
_FLOAT, _NUMBER = "f", "fiub"  # kinds of numpy's types
_RETURN_CODES = [code for name, code in vars(ReturnCode).items() if name.isupper()]
_CONTROLLERS = (ClientSideController, ClientControllerExecutor, HierarchicalUpdateGatherer)
"""Executors that send models by messages of their own, past the task result filters."""
_CHANNELS = (
    "nvflare.app_common.streamers.object_retriever",
    "nvflare.app_common.tie",
    "nvflare.app_opt.p2p",
    "nvflare.app_opt.tracking.mlflow.mlflow_receiver",
    "nvflare.app_opt.tracking.wandb.wandb_receiver",
    "nvflare.app_opt.xgboost",
    "nvflare.collab",
)
"""Modules of FLARE whose components send by channels of their own. Names, as for persistors: so none is imported."""
_PERSISTORS = (
    "nvflare.app_common.ccwf.comps.np_file_model_persistor.NPFileModelPersistor",
    "nvflare.app_common.np.np_model_persistor.NPModelPersistor",
    "nvflare.app_opt.pt.file_model_persistor.PTFileModelPersistor",
)
"""Classes whose first model is in the job, unless one of two attributes names another file."""


def read_tensor(value: Any, name: str) -> NDArray[Any]:
    """Return a tensor as an array; WsiFlError where it is none."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # such as PyTorch's bfloat16, or a tensor on a GPU
        array = np.empty(0, object)
    if array.dtype.kind not in _NUMBER:
        raise WsiFlError(f"{name} is no tensor of numbers on a CPU that numpy can read; let the job send float32")
    return array


def flatten_update(
    base: Mapping[str, NDArray[Any]], result: Mapping[str, Any], *, is_difference: bool, per_patient: bool
) -> NDArray[np.float64]:
    """Return an update float64[1, d], or float64[p, d] of p patients: its floating-point tensors in the base's order.

    Args:
        base: the weights that training began with.
        result: weights, or their difference from the base, of numpy or PyTorch; per patient a difference with a first
            axis of patients.

    Raises:
        WsiFlError: when a tensor is missing or has another shape. Other tensors of the result are ignored.
    """
    columns = []
    for name, start in base.items():
        if start.dtype.kind != _FLOAT:
            continue
        if name not in result:
            raise WsiFlError(f"the result lacks the tensor {name}, which the task brought")
        value = read_tensor(result[name], name).astype(np.float64)
        rows = value if per_patient else value[None]
        if rows.shape[1:] != start.shape or rows.ndim == start.ndim:
            raise WsiFlError(f"{name} has the shape {value.shape} in the result and {start.shape} in the task")
        columns.append((rows if is_difference else rows - start).reshape(len(rows), start.size))
    if not columns or len({len(rows) for rows in columns}) != 1:
        raise WsiFlError("the task has no floating-point tensors, or they have different numbers of patients")
    return np.concatenate(columns, axis=1)


def restore_update(
    base: Mapping[str, NDArray[Any]], values: NDArray[np.float32], *, is_difference: bool
) -> dict[str, NDArray[Any]]:
    """Return a released update in the shapes and types of the base; other numbers, such as counts, are the base's."""
    restored, at = {}, 0
    for name, start in base.items():
        if start.dtype.kind == _FLOAT:
            part, at = values[at : at + start.size].reshape(start.shape), at + start.size
            restored[name] = (part if is_difference else start + part.astype(np.float64)).astype(start.dtype)
        else:
            restored[name] = np.zeros_like(start) if is_difference else start
    return restored


class _TaskBase(NamedTuple):
    """The weights of a task: copies as arrays, empty tensors of their types, and the headers with numbers of rounds."""

    arrays: dict[str, NDArray[Any]]
    prototypes: dict[str, Any]
    headers: dict[str, Any]


def _copy_base(task: Shareable) -> _TaskBase:
    data = _read_dxo(task, "task", (DataKind.WEIGHTS,)).data
    arrays = {name: read_tensor(value, name).copy() for name, value in data.items()}
    prototypes = {name: value.new_empty(0) for name, value in data.items() if hasattr(value, "new_empty")}
    headers = {key: task.get_header(key) for key in _ROUND_HEADERS if task.get_header(key) is not None}
    return _TaskBase(arrays, prototypes, headers)


class LedgerFilter(Filter):  # type: ignore[misc]
    """Release each result of a job under the terms of an account file, or end the job at this site.

    Args:
        account: absolute path of the account file.
    """

    def __init__(self, account: str) -> None:
        super().__init__()
        self._account_path = Path(account)
        self._stopped_events: set[str] = set()

    @cached_property
    def _account_terms(self) -> UpdateTerms:
        return load_account(self._account_path)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Stop an event of the job on its way to the server, by marking it as one that came from there."""
        if event_type == EventType.ABOUT_TO_START_RUN:
            self._begin_run(fl_ctx)
        data = fl_ctx.get_prop(FLContextKey.EVENT_DATA)
        if fl_ctx.get_prop(FLContextKey.EVENT_SCOPE) != EventScope.FEDERATION or not isinstance(data, Shareable):
            return
        if data.get_header(FedEventHeader.DIRECTION, "out") == "out":
            data.set_header(FedEventHeader.DIRECTION, "in")
            if event_type not in self._stopped_events:
                self._stopped_events.add(event_type)
                self.log_info(fl_ctx, f"not sent: events {event_type}")

    def _begin_run(self, fl_ctx: FLContext) -> None:
        """Hear events before the job's components, which may send them, and end a job with channels of its own."""
        try:
            engine = fl_ctx.get_engine()
            engine.handlers.remove(self)  # FLARE goes through this list by index: no other component misses this event
            engine.handlers.insert(0, self)
            _refuse_channels(engine)
        except Exception as error:
            self.system_panic(self.log_refusal(error, fl_ctx), fl_ctx)

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Store a task's weights, or return its result as a release that is charged and on disk."""
        try:
            executor = fl_ctx.get_prop(FLContextKey.RUNNER).find_executor(fl_ctx.get_prop(FLContextKey.TASK_NAME))
            task_id = fl_ctx.get_prop(FLContextKey.TASK_ID)
            if self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN:
                _require_entries(fl_ctx)
                if isinstance(executor, _CONTROLLERS):
                    self._guard_learner(executor, fl_ctx)
                elif task_id is None:
                    raise WsiFlError("this task comes from another client, whose tasks have no id to charge once")
                else:
                    fl_ctx.set_prop(_BASE_KEY, _copy_base(shareable), private=True, sticky=False)
                return shareable
            if isinstance(getattr(executor, "learn_executor", None), _LedgerLearner):
                return _reply_code(shareable)  # the workflow's answer; its learner's results leave in its messages
            return self.release_result(shareable, fl_ctx.get_prop(_BASE_KEY), str(task_id), fl_ctx)
        except Exception as error:  # a job's own objects may raise anything
            raise ContentBlockedException(self.log_refusal(error, fl_ctx)) from None

    def log_refusal(self, error: Exception, fl_ctx: FLContext) -> str:
        """Log why nothing leaves, and return it as one line."""
        kind = "" if isinstance(error, WsiFlError) else f"unusable by the filter ({type(error).__name__}): "
        text = f"nothing leaves this site: {kind}{single_line(error)}"
        self.log_error(fl_ctx, text)
        return text

    def _guard_learner(self, controller: Executor, fl_ctx: FLContext) -> None:
        """Put the filter between a workflow and its learner, whose results FLARE shows to no task result filter."""
        learner = getattr(controller, "learn_executor", None)
        if isinstance(learner, _LedgerLearner):
            return
        is_plain = type(controller) in (SwarmClientController, CyclicClientController)  # a subclass may send anything
        if not is_plain or not isinstance(learner, Executor) or isinstance(learner, _CONTROLLERS):
            raise WsiFlError(
                f"{type(controller).__name__} sends results past the filters; of the workflows that clients control, "
                "only FLARE's own swarm and cyclic learning pass"
            )
        app = Path(fl_ctx.get_prop(FLContextKey.APP_ROOT))
        _guard_first_model(fl_ctx.get_engine().get_component(controller.persistor_id), app)
        controller.learn_executor = _LedgerLearner(controller, learner, self)
        # else a learner in a process of its own sends its tensors directly to the site that aggregates
        controller.requires_materialized_task_result = lambda task_name: True

    def release_result(self, result: Shareable, base: object, task: str, fl_ctx: FLContext) -> Shareable:
        """Return the result of a task as a release; of a failed task its return code alone."""
        if result.get_return_code() != ReturnCode.OK:
            return _reply_code(result)
        if not isinstance(base, _TaskBase):
            raise WsiFlError("privacy.json lacks this filter among the task data filters; name it there too")
        dxo = _read_dxo(result, "result", (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF))
        terms, unit = self._account_terms, dxo.get_meta_prop(UNIT_KEY, "site")
        is_difference, per_patient = dxo.data_kind == DataKind.WEIGHT_DIFF, unit == "patient"
        if unit != terms.unit or (per_patient and not is_difference):
            raise WsiFlError(
                f"{self._account_path.name} protects the unit {terms.unit!r}, and this job's result "
                f"({_name_kind(dxo)}, {unit!r}) does not keep it; for patients a job sends WEIGHT_DIFF with a row for "
                f'each and the meta {UNIT_KEY} = "patient"'
            )
        rows = flatten_update(base.arrays, dxo.data, is_difference=is_difference, per_patient=per_patient)
        release = release_update(rows, terms, job=str(fl_ctx.get_job_id()), task=task)
        self.log_info(fl_ctx, describe_release(release, terms))
        if dropped := _list_dropped(result, dxo, base.arrays):
            self.log_info(fl_ctx, f"not sent: {', '.join(dropped)}")
        sent: dict[str, Any] = dict(restore_update(base.arrays, release.values, is_difference=is_difference))
        sent |= {name: like.new_tensor(sent[name]) for name, like in base.prototypes.items()}
        answer = DXO(dxo.data_kind, sent, _price_meta(release, terms)).to_shareable()
        for key, value in base.headers.items():
            answer.set_header(key, value)
        return answer


class _LedgerLearner(Executor):  # type: ignore[misc]
    """The learner of a workflow that clients control: it returns releases, which the workflow may send to anyone."""

    def __init__(self, controller: Executor, learner: Executor, ledger_filter: LedgerFilter) -> None:
        super().__init__()
        self._controller, self._learner, self._filter = controller, learner, ledger_filter

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Train, and return the release of a round, which is charged once."""
        try:
            base = _copy_base(shareable)
            task = f"{self._controller.workflow_id}, round {shareable.get_header(AppConstants.CURRENT_ROUND)}"
            result = self._learner.execute(task_name, shareable, fl_ctx, abort_signal)
            return self._filter.release_result(result, base, task, fl_ctx)
        except Exception as error:
            self._filter.log_refusal(error, fl_ctx)
            return make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR)


def _guard_first_model(persistor: object, app: Path) -> None:
    """Require that a workflow's first model comes from the folder of the job's app, not from a file of the site."""
    kind = type(persistor)
    if f"{kind.__module__}.{kind.__qualname__}" not in _PERSISTORS:  # a subclass may read any file
        allowed = ", ".join(name.rpartition(".")[2] for name in _PERSISTORS)
        raise WsiFlError(f"{kind.__name__} may send a file of this site as the first model; use one of {allowed}")
    for key, folder in (("source_ckpt_file_full_name", app / "custom"), ("ckpt_preload_path", app)):
        file = getattr(persistor, key, None)
        if file and not (folder / file).resolve().is_relative_to(app.resolve()):
            raise WsiFlError(f"this job would send this site's {file} as its first model; let the job bring that file")


def _refuse_channels(engine: Any) -> None:
    """Refuse a job with a component, such as an executor, that sends by a channel of its own."""
    for entry in (*engine.get_all_components().values(), *engine.handlers):
        modules = [f"{kind.__module__}." for kind in type(entry).__mro__]
        if any(module.startswith(f"{name}.") for module in modules for name in _CHANNELS):
            raise WsiFlError(f"{type(entry).__name__} sends past the filters, by a channel of its own")


def _require_entries(fl_ctx: FLContext) -> None:
    """Require that privacy.json names the filter at the other two places, and that nothing of the job passes it."""
    engine = fl_ctx.get_engine()
    scope, components = fl_ctx.get_prop(FLContextKey.SCOPE_OBJECT), engine.get_all_components()
    results = scope.task_result_filters[FilterKey.OUT] if scope else []
    for place, entries in (("components", components.values()), ("task result filters", results)):
        if not any(isinstance(entry, LedgerFilter) for entry in entries):
            raise WsiFlError(f"privacy.json lacks this filter among its {place}; name it there too")
    if not isinstance(engine.handlers[0], LedgerFilter):
        raise WsiFlError("another component hears events before this filter, and could send them; use NVIDIA FLARE 2.9")
    _refuse_channels(engine)  # again: a component may have been built since the run began


def _reply_code(result: Shareable) -> Shareable:
    """Return an answer with the return code alone, which an executor may set to anything."""
    code = result.get_return_code()
    return make_reply(code if code in _RETURN_CODES else ReturnCode.EXECUTION_EXCEPTION)


def _read_dxo(shareable: Shareable, label: str, kinds: tuple[str, ...]) -> DXO:
    if shareable.get_header(ReservedHeaderKey.CONTENT_TYPE) != "DXO":
        raise WsiFlError(f"this {label} is no model: only jobs that send weights, or their difference, pass")
    dxo = from_shareable(shareable)
    if dxo.data_kind not in kinds:
        raise WsiFlError(f"this {label} is {_name_kind(dxo)}, and only {' and '.join(kinds)} pass")
    return dxo


def _name_kind(dxo: DXO) -> str:
    return str(getattr(dxo.data_kind, "value", dxo.data_kind))


def _price_meta(release: UpdateRelease, terms: UpdateTerms) -> dict[str, Any]:
    """Return the meta of a release: ε of the job as a metric, and its terms. They follow from public numbers."""
    price = {
        "release": release.number,
        "epsilon": release.epsilon,
        "patient_epsilon": release.patient_epsilon,
        "delta": terms.delta,
        "unit": terms.unit,
        **asdict(terms.release_mechanism),
    }
    return {METRICS_KEY: price, MetaKey.INITIAL_METRICS: {"epsilon": release.epsilon}}


def _list_dropped(result: Shareable, dxo: DXO, base: Mapping[str, NDArray[Any]]) -> list[str]:
    """Return the names of all that a result holds and that is not sent."""
    dropped = [f"tensor {name}" for name in dxo.data if name not in base]
    dropped += [f"values of {name}" for name, start in base.items() if start.dtype.kind != _FLOAT]
    dropped += [f"meta {key}" for key in dxo.get_meta_props() if key != UNIT_KEY]
    framework = {ReservedHeaderKey.CONTENT_TYPE, ReservedHeaderKey.RC, *_ROUND_HEADERS}
    dropped += [f"header {key}" for key in result.get(ReservedHeaderKey.HEADERS, {}) if key not in framework]
    return dropped + [f"entry {key}" for key in result if key not in ("DXO", ReservedHeaderKey.HEADERS)]
