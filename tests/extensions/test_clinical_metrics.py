"""Clinical metrics on scikit-learn's table of breast tumors agree with established libraries."""

from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, binomtest, mannwhitneyu
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, recall_score, roc_auc_score
from sklearn.model_selection import cross_val_predict
from statsmodels.stats.proportion import proportion_confint

from wsi_fl.data.prediction_table import PredictionTable
from wsi_fl.evidence import clinical as stage
from wsi_fl.evidence import clinical_metrics
from wsi_fl.evidence.clinical_metrics import _Interval
from wsi_fl.evidence.clinical_section import build_clinical_cells, build_clinical_section, list_clinical_findings
from wsi_fl.slides.patching.mosaic import _find_candidates
from wsi_fl.stages.evaluation import predict


@pytest.fixture(scope="module")
def tumours():
    """Return (score, whether malignant) of 569 patients by two imperfect features."""
    x, y = load_breast_cancer(return_X_y=True)
    case = y == 0
    model = LogisticRegression(max_iter=1000)
    return cross_val_predict(model, x[:, [1, 8]], case, cv=5, method="predict_proba")[:, 1], case


def test_values_at_an_operating_point_are_those_of_the_libraries(tumours):
    score, case = tumours
    said = score >= 0.4
    found = clinical_metrics._operating_values(said, case)
    assert found["sensitivity"].value == recall_score(case, said)
    assert found["specificity"].value == recall_score(~case, ~said)
    for name, n in (("sensitivity", case.sum()), ("ppv", said.sum())):
        low, high = proportion_confint((case & said).sum(), n, method="wilson")
        assert (found[name].low, found[name].high, found[name].n) == pytest.approx((low, high, n))
    assert clinical_metrics._operating_values(score >= 2, case)["ppv"] is None


def test_predictive_values_at_the_prevalence_at_hand_are_those_counted(tumours):
    score, case = tumours
    found = clinical_metrics._operating_values(score >= 0.4, case)
    both = found["sensitivity"], found["specificity"]
    odds = case.mean() / (1 - case.mean())
    ppv, npv = (clinical_metrics._predictive_value(*one) for one in ((*both, odds), (*both[::-1], 1 / odds)))
    assert (ppv.value, npv.value) == pytest.approx((found["ppv"].value, found["npv"].value))
    assert ppv.low < ppv.value < ppv.high and npv.low < npv.value < npv.high
    rng = np.random.default_rng(0)
    se, sp = (rng.binomial(one.n, one.value, 4000) / one.n for one in both)
    drawn = se * 0.1 / (se * 0.1 + (1 - sp) * 0.9)
    ppv = clinical_metrics._predictive_value(*both, 0.1 / 0.9)
    assert (ppv.low, ppv.high) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.01)
    perfect = clinical_metrics._predictive_value(*[_Interval(1.0, 0.9, 1.0, 40)] * 2, 0.1 / 0.9)
    assert perfect.value == perfect.high == 1.0 and perfect.low < 0.95


def test_areas_are_those_of_scikit_learn_and_their_variance_that_of_the_bootstrap(tumours):
    score, case = tumours
    other = np.random.default_rng(1).permutation(score) * 0.5 + score * 0.5
    areas, covariance = clinical_metrics._delong_covariance(np.stack([score, other]), case)
    assert areas == pytest.approx([roc_auc_score(case, one) for one in (score, other)])
    rng, drawn = np.random.default_rng(2), []
    for _ in range(250):
        rows = rng.integers(len(case), size=len(case))
        cases, others = rows[case[rows]], rows[~case[rows]]
        won = [mannwhitneyu(one[cases], one[others]).statistic for one in (score, other)]
        drawn.append(np.array(won) / len(cases) / len(others))
    assert covariance == pytest.approx(np.cov(np.transpose(drawn)), rel=0.2)
    found = clinical_metrics.auroc_difference(score, other, case)
    assert found.value == pytest.approx(areas[0] - areas[1]) and found.low > 0 and found.p < 1e-6
    same = clinical_metrics.auroc_difference(score, score**2, case)
    assert same.value == 0 and same.p is None
    assert clinical_metrics.describe_class(score, score >= 0.5, case)["auprc"] == average_precision_score(case, score)


def test_delong_is_its_definition():
    """The definition: areas of structural components, pair by pair of patients, with ties counted half."""
    rng = np.random.default_rng(3)
    scores, case = rng.integers(6, size=(2, 25)).astype(float), np.arange(25) < 10
    areas, covariance = clinical_metrics._delong_covariance(scores, case)
    won = np.array([[[np.heaviside(a - b, 0.5) for b in one[~case]] for a in one[case]] for one in scores])
    expected = np.cov(won.mean(2)) / 10 + np.cov(won.mean(1)) / 15
    assert areas == pytest.approx(won.mean((1, 2))) and covariance == pytest.approx(expected)


def test_calibration_is_that_of_logistic_regression(tumours):
    score, case = tumours
    score = np.clip(score**1.3, 1e-6, 1 - 1e-6)
    lp = np.log(score / (1 - score))
    found = clinical_metrics._fit_calibration(score, case)
    both = sm.Logit(case.astype(float), sm.add_constant(lp)).fit(disp=0)
    shift = sm.GLM(case.astype(float), np.ones(len(lp)), family=sm.families.Binomial(), offset=lp).fit()
    for one, fit, k in ((found["slope"], both, 1), (found["intercept"], shift, 0)):
        assert (one.value, one.low, one.high) == pytest.approx((fit.params[k], *fit.conf_int()[k]), abs=1e-5)
    parted = np.where(case, 0.9, 0.1)
    assert (
        clinical_metrics._fit_calibration(parted, case) is None
        and clinical_metrics._fit_calibration(score, case | True) is None
    )


def test_a_perfect_ranking_of_few_patients_has_a_wide_interval():
    found = clinical_metrics._auroc_interval(np.linspace(0, 1, 18), np.arange(18) >= 10)
    assert (found.value, found.high) == (1, 1) and found.low == pytest.approx(0.025 ** (1 / 8))
    worst = clinical_metrics._auroc_interval(np.linspace(1, 0, 18), np.arange(18) >= 10)
    assert (worst.value, worst.low) == (0, 0) and worst.high == pytest.approx(1 - found.low)


def test_patients_are_counted_not_their_examples():
    said = np.array([[0.9, 0.1], [0.3, 0.7], [0.8, 0.2], [0.6, 0.4], [0.4, 0.6]])
    patient = np.array(["a", "a", "b", "b", "c"])
    three = np.array([[0.2, 0.3, 0.5], [0.6, 0.2, 0.2], [0.1, 0.8, 0.1]])
    for probabilities, truth, patients, scores, classes, any_counts in (
        (said, [0, 0, 1, 1, 0], patient, [0.4, 0.3, 0.6], [0, 1, 0], False),
        (said, [0, 1, 0, 0, 0], patient, [0.7, 0.4, 0.6], [1, 0, 0], True),  # any example makes a case
        (three, [2, 2, 1], np.array(["a", "a", "b"]), [0.25, 0.8], [2, 1], False),
        (said, [0] * 5, np.arange(5).astype(str), said[:, 1], [0] * 5, False),
    ):
        found, any_example = clinical_metrics.aggregate_patients(probabilities, np.array(truth), patients)
        assert found[1].to_numpy() == pytest.approx(np.array(scores)) and found["truth"].tolist() == classes
        assert found.index.tolist() == sorted(set(patients)) and any_example == any_counts


def test_subgroups_of_few_patients_have_no_metrics(tumours):
    score, case = tumours
    groups = np.where(np.arange(len(case)) < 9, "few", np.where(np.arange(len(case)) < 200, "some", ""))
    found = clinical_metrics.describe_subgroups(groups, score >= 0.5, case, score)
    assert found["few"] is None and list(found) == ["", "few", "some"]
    mine = groups == "some"
    assert found["some"]["sensitivity"]["value"] == recall_score(case[mine], score[mine] >= 0.5)
    n, all_x = np.arange(40), np.full(40, "x")
    few_cases = clinical_metrics.describe_subgroups(all_x, n < 5, n < 6, np.linspace(1, 0, 40))["x"]
    assert few_cases["sensitivity"] is few_cases["cases"] is few_cases["auroc"] is None
    assert few_cases["specificity"]["n"] == 34


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 12), st.integers(0, 12), st.floats(0.001, 0.999))
def test_describe_class_handles_any_small_number_of_patients(cases, others, prevalence):
    case, score = np.arange(cases + others) < cases, np.linspace(0, 1, cases + others)
    found = clinical_metrics.describe_class(score, score > 0.5, case, prevalence)
    assert (found["n"], found["cases"]) == (cases + others, cases)
    assert (found["auprc"] is None) == (not cases or not others)  # of cases alone every model has 1
    at = found.get("at_prevalence", {})
    for one in (found["sensitivity"], found["ppv"], at.get("ppv"), at.get("npv")):
        assert one is None or 0 <= one["low"] <= one["value"] <= one["high"] <= 1


UNSURE = np.full(8, 0.5)
PERFECT = np.linspace(0, 1, 8)


@pytest.mark.parametrize(
    ("ours", "theirs", "value", "most"),
    [
        (PERFECT, UNSURE, 0.5, 0.5),
        (UNSURE, PERFECT, -0.5, 0.5),
        (PERFECT, 1 - PERFECT, 1.0, 1.0),
        (1 - PERFECT, UNSURE, -0.5, 0.5),
    ],
)
def test_models_with_one_constant_difference_differ_by_the_sign_test(ours, theirs, value, most):
    """The interval is that of four of four pairs, and p of a sign test on them."""
    found = clinical_metrics.auroc_difference(ours, theirs, np.arange(8) >= 4)
    low, high = proportion_confint(4, 4, method="beta")
    ends = sorted(np.sign(value) * most * (2 * np.array([low, high]) - 1))
    assert (found.value, found.low, found.high) == pytest.approx((value, *ends))
    assert found.p == pytest.approx(binomtest(4, 4).pvalue) and found.n == 8


def test_pairs_with_differing_scores_and_equal_patients_count_in_part():
    """Of two cases and two others, each gains one half: one pair a whole and one nothing."""
    case = np.array([True, True, False, False])
    ours, theirs = np.array([2.0, 4.0, 1.0, 3.0]), np.array([1.0, 3.0, 2.0, 4.0])
    found = clinical_metrics.auroc_difference(ours, theirs, case)
    ends = 2 * np.array([beta.ppf(0.025, 1.5, 1.5), beta.ppf(0.975, 2.5, 0.5)]) - 1
    assert (found.value, found.low, found.high) == pytest.approx((0.5, *ends)) and found.p == 1
    same = clinical_metrics.auroc_difference(ours, ours**3, case)
    assert (same.value, same.low, same.high, same.p) == (0, 0, 0, None)


def test_p_is_never_zero():
    rng, case = np.random.default_rng(0), np.arange(3000) >= 1500
    good, bad = rng.normal(3.0 * case, 1), rng.normal(-3.0 * case, 1)
    found = clinical_metrics.auroc_difference(good, bad, case)
    assert 0 < found.p < 1e-100
    few = clinical_metrics.auroc_difference(np.where(case, 2.0, rng.random(3000)), rng.random(3000), case)
    assert 0 < few.p < 1e-50


def test_net_benefit_at_a_prevalence_needs_cases_and_non_cases():
    score, at = np.array([0.9, 0.8, 0.6, 0.4]), [0.1, 0.25, 0.5]
    for case in (np.ones(4, bool), np.zeros(4, bool)):
        found = clinical_metrics.net_benefit(score, case, at, 0.05)
        assert found["everybody"] == pytest.approx([0.05 - 0.95 * t / (1 - t) for t in at])
        assert found["model"] == [None] * 3
        assert clinical_metrics.describe_class(score, score > 0.5, case, 0.05).get("at_prevalence") is None


@pytest.mark.parametrize("prevalence", [None, 0.05])
def test_net_benefit_is_that_of_dcurves(tumours, prevalence):
    (score, case), thresholds = tumours, [0.05, 0.1, 0.25, 0.5, 0.8]
    found = clinical_metrics.net_benefit(score, case, thresholds, prevalence)
    data = pd.DataFrame({"case": case.astype(int), "model": score})
    asked = {"modelnames": ["model"], "thresholds": thresholds, "prevalence": prevalence}
    table = pytest.importorskip("dcurves").dca(data=data, outcome="case", **asked)
    for name, known in (("model", "model"), ("everybody", "all")):
        expected = table[table["model"] == known].sort_values("threshold")["net_benefit"].to_numpy()
        assert found[name] == pytest.approx(expected, abs=1e-9)


def describe_site(case, prevalence):
    """Return the document of one site with a perfect model beside a constant local one."""
    score, at = np.where(case, 0.9, 0.1), [0.1, 0.25, 0.5]
    more = clinical_metrics.auroc_difference(score, np.full(len(case), 0.5), case)
    one = clinical_metrics.describe_class(score, score > 0.5, case, prevalence) | {
        "net_benefit": clinical_metrics.net_benefit(score, case, at, prevalence),
        "over_local": asdict(more) if more else None,
        "subgroups": None,
    }
    site = {"site": "C1", "on": "own", "model": "proxy", "unit": "patient", "any_counts": False, "point": 0.5}
    return {
        "prevalence": prevalence,
        "by": None,
        "least": 10,
        "thresholds": at,
        "sites": [site | {"classes": {"tumor": one}}],
    }


def test_the_page_reports_the_gain_over_a_constant_local_model_with_its_interval():
    found = " ".join(list_clinical_findings(describe_site(np.arange(6) > 2, None)))
    assert "AUROC is 0.50 above that of its local model (−0.21 to +0.50)" in found


@pytest.mark.parametrize("case", [np.ones(4, bool), np.zeros(4, bool)])
@pytest.mark.parametrize("prevalence", [None, 0.05])
def test_a_page_is_written_for_patients_of_one_class(case, prevalence):
    """Net benefit at another prevalence is unknown, so the model's curve is not drawn."""
    page = build_clinical_section(describe_site(case, prevalence), {"C1": "#123456"})
    ((title, chart),) = page["curves"]
    assert title == "Net benefit, tumor" and ("C1" in chart.alt) == (prevalence is None)
    assert page["cells"][0]["AUROC"] == "–"


@pytest.mark.parametrize("n_classes", [1, 3, 5])
def test_more_than_two_classes_are_scored_one_against_the_rest(n_classes):
    rng, names = np.random.default_rng(0), np.array([f"p{k}" for k in range(60)])
    said, truth = rng.dirichlet(np.ones(n_classes), 60), rng.integers(0, n_classes, 60)
    outputs = tuple(f"grade {k}" for k in range(n_classes))
    patients, _ = clinical_metrics.aggregate_patients(said, truth, names)
    obs = pd.DataFrame({"part": "C1", "slide": names, "patient": names, "label": truth})
    table = PredictionTable("C1", "proxy", obs, {"proxy": said}, outputs)
    asked = stage._SitePatients(patients.assign(predicted=said.argmax(1)), table)
    found = stage._describe_site("C1", [asked], None, 10)["classes"]
    assert [*found] == [*outputs]
    for k, one in enumerate(found.values()):
        recall = recall_score(truth == k, said.argmax(1) == k)
        assert (one["cases"], one["sensitivity"]["value"]) == ((truth == k).sum(), recall)
        area = one["auroc"] and one["auroc"]["value"]
        assert area == (None if n_classes == 1 else pytest.approx(roc_auc_score(truth == k, said[:, k])))


@pytest.mark.parametrize(
    ("prevalence", "words"), [(0.004, "0.4 %"), (0.015, "1.5 %"), (0.07, "7 %"), (0.9995, "99.95 %")]
)
def test_a_stated_prevalence_is_reported_as_stated(tumours, prevalence, words):
    case = tumours[1]
    document = describe_site(case, prevalence)
    assert {f"PPV at {words}", f"NPV at {words}"} <= set(build_clinical_cells(document)[0])
    assert build_clinical_section(document, {"C1": "#123456"})["share"] == f"{words} of patients"


@pytest.mark.parametrize(
    ("share", "words"), [(0.0, "0 %"), (1e-5, "under 1 %"), (0.5, "50 %"), (0.9999, "over 99 %"), (1.0, "100 %")]
)
def test_a_share_of_patches_is_reported_as_none_or_all_only_where_exact(share, words):
    assert predict._format_percent(share) == words


@pytest.mark.parametrize(("best", "least"), [(0.499, 0.5), (0.6996, 0.7), (0.004, 0.005)])
def test_too_little_tissue_is_not_rounded_up_to_enough(best, least):
    _, note = _find_candidates(np.array([best, 0], np.float32), least, 3)
    assert f"{100 * least:g}% tissue" in note and f"({100 * best:g}%)" in note
