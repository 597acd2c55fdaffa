"""GradBench's protocol, and its modules in both engines against PyTorch and closed forms."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from fractions import Fraction

import numpy as np
import pytest

from experiments.gradbench import protocol

torch = pytest.importorskip("torch")


def mixture(d: int = 3, k: int = 4, n: int = 20, m: int = 2, gamma: float = 1.3) -> dict:
    rng = np.random.default_rng(5)
    return {
        "d": d,
        "k": k,
        "n": n,
        "x": rng.normal(size=(n, d)).tolist(),
        "m": m,
        "gamma": gamma,
        "mu": rng.uniform(size=(k, d)).tolist(),
        "q": rng.normal(size=(k, d)).tolist(),
        "l": rng.normal(size=(k, d * (d - 1) // 2)).tolist(),
        "alpha": rng.normal(size=k).tolist(),
    }


def as_of_old(given: dict) -> dict:
    kept = {name: given[name] for name in ("d", "k", "n", "x", "m", "gamma", "alpha")}
    return {**kept, "means": given["mu"], "icf": np.hstack([given["q"], given["l"]]).tolist()}


def evaluation(module: str, function: str, given: object) -> dict:
    return {"kind": "evaluate", "module": module, "function": function, "input": given, "description": "-"}


LINE = {"x": [0.1, -0.2, 0.3], "n": 16}
MIDDLE = {"x": [0.1, -0.2, 0.3], "n": 99}  # with a point at 0, to which np.linspace gives a sign
POINTS = np.random.default_rng(6).uniform(size=(30, 3))
CLUSTERS = {"points": POINTS.tolist(), "centroids": POINTS[:4].tolist()}
NUMBERS = {"x": [1.0, 2.0, 3.5, 1000.0]}
MESSAGES = [
    {"kind": "start", "eval": "hello", "config": {}},
    {"kind": "define", "module": "gmm"},
    {"kind": "define", "module": "ba"},
    evaluation("hello", "square", 3.0),
    evaluation("hello", "double", 3),
    evaluation("lse", "primal", NUMBERS),
    evaluation("lse", "gradient", {**NUMBERS, "min_runs": 3, "min_seconds": 0}),
    evaluation("llsq", "primal", LINE),
    evaluation("llsq", "gradient", {**LINE, "min_runs": 1, "min_seconds": 0.01}),
    evaluation("gmm", "objective", mixture()),
    evaluation("gmm", "jacobian", mixture()),
    evaluation("gmm", "jacobian", as_of_old(mixture())),
    evaluation("gmm", "objective", as_of_old(mixture(d=1, n=2))),
    {"kind": "analysis", "of": 3, "valid": True},
    evaluation("gmm", "objective", {**mixture(), "mu": [[0.0]]}),
    evaluation("lse", "primal", {"x": "words"}),
    evaluation("lse", "primal", {"x": []}),
    evaluation("llsq", "hessian", LINE),
    evaluation("llsq", "primal", None),
    evaluation("lse", "primal", {**NUMBERS, "min_runs": "many"}),
    evaluation("lse", "primal", {**NUMBERS, "min_seconds": float("inf")}),
    evaluation("hello", "square", 1e200),
    evaluation("llsq", "primal", MIDDLE),
    evaluation("llsq", "gradient", MIDDLE),
    evaluation("gmm", "objective", mixture(m=50)),
    evaluation("gmm", "objective", {**mixture(), "m": 2**62}),
    evaluation("gmm", "objective", {**mixture(), "gamma": 0}),
    evaluation("lse", "primal", {"x": [1.0, None]}),
    evaluation("lse", "primal", {"x": ["1", "2"]}),
    evaluation("lse", "primal", {"x": [10**400]}),
    evaluation("hello", "square", 10**400),
    {"kind": "define", "module": "particle"},
    evaluation("particle", "rr", {"w": 0.2072}),
    evaluation("kmeans", "cost", CLUSTERS),
    evaluation("kmeans", "dir", {**CLUSTERS, "min_runs": 2}),
    evaluation("kmeans", "dir", {**CLUSTERS, "min_runs": 2}),
    evaluation("kmeans", "dir", {**CLUSTERS, "centroids": [[0.5]]}),
]


@pytest.fixture(scope="module", params=protocol.ENGINES)
def answers(request) -> list[dict]:
    """Answers of the command itself, in its own process: one conversation with everything in it."""
    if request.param == "julia":
        request.getfixturevalue("julia")
    lines = "".join(json.dumps({"id": i, **message}) + "\n" for i, message in enumerate(MESSAGES))
    command = [sys.executable, "-m", "experiments", "gradbench", "--engine", request.param]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["id"] for answer in found] == list(range(len(MESSAGES)))
    return found


def names(answer: dict) -> list[str]:
    assert all(isinstance(t["nanoseconds"], int) for t in answer["timings"])
    return [t["name"] for t in answer["timings"]]


def test_start_and_define_say_what_there_is(answers):
    assert answers[0]["tool"].startswith("twingrad-")
    assert answers[1] == {"id": 1, "success": True}
    assert not answers[2]["success"]
    assert f"there are {', '.join(protocol.modules())}" in answers[2]["error"]


def test_a_module_of_one_engine_is_refused_by_the_other(answers):
    if answers[0]["tool"] == "twingrad-numpy":
        assert answers[31] == {"id": 31, "success": True}
        assert answers[32]["output"] == pytest.approx(0.20719, abs=1e-4)  # GradBench's own expectation
        assert names(answers[32]) == ["evaluate"]  # it is not compiled
    else:
        assert all(not a["success"] and "'particle' is for the numpy engine only" in a["error"] for a in answers[31:33])


def test_each_run_has_a_timing_and_the_preparation_one_of_its_own(answers):
    assert names(answers[3]) == ["prepare", "evaluate"]
    assert names(answers[6]) == ["prepare", *["evaluate"] * 3]
    timings = answers[8]["timings"]
    assert sum(t["nanoseconds"] for t in timings if t["name"] == "evaluate") >= 1e7
    assert names(answers[8])[0] == "prepare" and set(names(answers[8])[1:]) == {"evaluate"}


def test_what_was_compiled_serves_later_messages(answers):
    assert names(answers[34]) == ["prepare", "evaluate", "evaluate"]
    assert names(answers[35]) == ["evaluate", "evaluate"]
    assert answers[35]["output"] == answers[34]["output"]


def test_kmeans_is_its_closed_form(answers):
    centroids = POINTS[:4]
    away = np.sum((POINTS[:, None] - centroids) ** 2, axis=2)
    nearest = np.argmin(away, axis=1)
    assert answers[33]["output"] == pytest.approx(np.sum(np.min(away, axis=1)))
    means = np.stack([POINTS[nearest == j].mean(axis=0) for j in range(4)])
    np.testing.assert_allclose(answers[34]["output"], centroids - means, rtol=1e-8, atol=1e-12)


def test_hello_lse_and_llsq_are_their_closed_forms(answers):
    assert (answers[3]["output"], answers[4]["output"]) == (9.0, 6.0)
    assert answers[5]["output"] == pytest.approx(1000.0)
    assert answers[6]["output"] == pytest.approx([0.0, 0.0, 0.0, 1.0])
    for given, place in ((LINE, 7), (MIDDLE, 22)):
        n = given["n"]
        t = np.array([float(Fraction(2 * i, n - 1) - 1) for i in range(n)])
        powers = t[:, None] ** np.arange(3)
        residual = np.sign(t) - powers @ given["x"]
        assert answers[place]["output"] == pytest.approx(residual @ residual / 2)
        assert answers[place + 1]["output"] == pytest.approx(-powers.T @ residual)


def log_posterior(given: dict, alpha, mu, q, lower, sign=1):
    """With the densities of torch.distributions, point by point: nothing of the engines' formula."""
    d, k = given["d"], given["k"]
    rows, columns = np.tril_indices(d, -1)
    by_columns = np.lexsort((rows, columns))
    total, precisions = 0.0, []
    for j in range(k):
        Q = torch.diag(torch.exp(q[j]))
        Q[rows[by_columns], columns[by_columns]] = lower[j]
        precisions.append(Q.T @ Q)
    normals = [torch.distributions.MultivariateNormal(mu[j], precision_matrix=precisions[j]) for j in range(k)]
    for point in torch.tensor(given["x"], dtype=torch.float64):
        densities = torch.stack([normal.log_prob(point) for normal in normals])
        total = total + torch.logsumexp(torch.log_softmax(alpha, 0) + densities, 0)
    scale = torch.eye(d, dtype=torch.float64) / given["gamma"] ** 2
    prior = torch.distributions.Wishart(
        torch.tensor(d + given["m"] + 1.0, dtype=torch.float64), covariance_matrix=scale
    )
    return total + sign * sum(prior.log_prob(precision) for precision in precisions)


def leaves(given: dict):
    return [torch.tensor(given[name], dtype=torch.float64, requires_grad=True) for name in ("alpha", "mu", "q", "l")]


def test_gmm_is_the_posterior_of_torchs_distributions(answers):
    given = mixture()
    parameters = leaves(given)
    value = log_posterior(given, *parameters)
    value.backward()
    assert answers[9]["output"] == pytest.approx(value.item())
    for name, tensor in zip(("alpha", "mu", "q", "l"), parameters, strict=True):
        np.testing.assert_allclose(answers[10]["output"][name], tensor.grad, rtol=1e-8, err_msg=name)
    # Older versions of the benchmark subtract the prior.
    parameters = leaves(given)
    log_posterior(given, *parameters, sign=-1).backward()
    alpha, mu, q, lower = (tensor.grad.numpy() for tensor in parameters)
    assert answers[11]["output"] == pytest.approx(
        np.concatenate([alpha, mu.ravel(), np.hstack([q, lower]).ravel()]), rel=1e-8
    )
    tiny = mixture(d=1, n=2)
    assert answers[12]["output"] == pytest.approx(log_posterior(tiny, *leaves(tiny), sign=-1).item())
    many = mixture(m=50)
    assert answers[24]["output"] == pytest.approx(log_posterior(many, *leaves(many)).item())


def test_an_analysis_is_acknowledged(answers):
    assert answers[13] == {"id": 13}


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (14, "mu: expected shape (4, 3)"),
        (15, "x: expected an array of numbers"),
        (16, "at least one number"),
        (17, "has no function 'hessian'; it has primal, gradient"),
        (18, "the input has no 'x'"),
        (19, "min_runs: expected a number of at most 1,000,000, found 'many'"),
        (20, "min_seconds: expected a number of at most 3,600, found inf"),
        (21, "the result is not finite"),
        (25, "m: expected a whole number of at most 9007199254740992"),
        (26, "gamma: expected a number above 0, found 0.0"),
        (27, "x: expected an array of numbers with 1 axes, found other things in it"),
        (28, "x: expected an array of numbers with 1 axes, found other things in it"),
        (29, "x: expected an array of numbers with 1 axes (int too large"),
        (30, "the input: int too large"),
        (36, "points of shape (30, 3) and centroids of shape (1, 1) do not fit"),
    ],
)
def test_a_wrong_input_is_told_of_and_the_conversation_goes_on(answers, place, message):
    assert not answers[place]["success"]
    assert message in answers[place]["error"]


@pytest.mark.parametrize(
    "line",
    [
        *("words", "[1]", '{"kind": "start"}', '{"id": 3}'),
        pytest.param("1" * 5000, id="digits"),
        pytest.param("[" * 100_000, id="brackets"),
    ],
)
def test_a_line_that_is_no_message_ends_it_with_an_error_that_names_the_line(line):
    with pytest.raises(protocol.MessageError, match="line 2 of standard input"):
        protocol.serve("numpy", ['{"id": 0, "kind": "start"}', line], io.StringIO())


def test_end_ends_it():
    out = io.StringIO()
    protocol.serve("numpy", ['{"id": 0, "kind": "end"}', "not read"], out)
    assert out.getvalue() == ""


@pytest.mark.parametrize("engine", protocol.ENGINES)
def test_it_waits_for_messages_that_come_one_by_one(engine, request):
    if engine == "julia":
        request.getfixturevalue("julia")
    command = [sys.executable, "-m", "experiments", "gradbench", "--engine", engine]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tool:
        for i in range(2):
            time.sleep(0.2 * i)  # with nothing to read yet
            print(json.dumps({"id": i, "kind": "define", "module": "lse"}), file=tool.stdin, flush=True)
            assert json.loads(tool.stdout.readline()) == {"id": i, "success": True}


MODULE = """
def read(given):
    return [np.array(given)], ()


def write(result, given):
    return float(result[0])


def cube():
    return lambda x: x**3


def falling():
    return lambda x: x if x < 0 else falling()(x - 1)  # which cannot be compiled


FUNCTIONS = {"cube": cube, "falling": falling, "of_julia": None}
EAGER = ("falling",)
"""


@pytest.fixture
def new_module(tmp_path, monkeypatch):
    """A module that is added for a moment, `cubes`."""
    (tmp_path / "cubes.py").write_text(f"import numpy as np\n{MODULE}", "utf-8")
    monkeypatch.setattr(protocol.gradbench, "__path__", [*protocol.gradbench.__path__, str(tmp_path)])
    yield "cubes"
    sys.modules.pop("experiments.gradbench.cubes", None)


def conversation(messages: list[dict]) -> list[dict]:
    out = io.StringIO()
    protocol.serve("numpy", [json.dumps({"id": i, **message}) for i, message in enumerate(messages)], out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_module_is_a_file_and_its_functions_may_run_eagerly(new_module):
    cubes = conversation(
        [
            {"kind": "define", "module": new_module},
            evaluation(new_module, "cube", 2.0),
            evaluation(new_module, "cube", 3.0),
            evaluation(new_module, "falling", 2.5),
            evaluation(new_module, "of_julia", 2.5),
        ]
    )
    assert cubes[0] == {"id": 0, "success": True}
    assert [answer["output"] for answer in cubes[1:4]] == [8.0, 27.0, -0.5]
    assert [names(answer) for answer in cubes[1:4]] == [["prepare", "evaluate"], ["evaluate"], ["evaluate"]]
    assert "has no function 'of_julia'; it has cube, falling" in cubes[4]["error"]


def test_a_module_without_functions_for_numpy_is_julias_only(new_module, monkeypatch):
    module = protocol._module(new_module)
    monkeypatch.setattr(module, "FUNCTIONS", {"cube": None})
    (answer,) = conversation([{"kind": "define", "module": new_module}])
    assert not answer["success"] and "'cubes' is for the Julia engine only" in answer["error"]


def test_only_the_last_compiled_functions_are_kept(new_module):
    tool = protocol.Numpy(1)
    for n in range(protocol.KEPT + 2):
        protocol._evaluate(tool, {"module": "lse", "function": "primal", "input": {"x": [1.0] * (n + 1)}})
    assert len(tool._known) == protocol.KEPT
