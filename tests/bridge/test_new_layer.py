"""Adding a layer: one class of the spec and one of the engine, in a copy of the packages, and all the rest follows."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bridge import spec
from bridge.layers import LAYERS
from py_engine import network

ROOT = Path(spec.__file__).parents[1]

OF_THE_SPEC = '''

class Gain(Layer):
    """Every feature, the last axis, times its gain, softly bounded."""

    lengths: ClassVar[Mapping[str, int]] = {"features": -1}
    op: Literal["gain"]
    bound: Annotated[float, Field(gt=0, le=10)] = 2.0
    gain_init: Initialiser = ONES

    def parameters(self, input: Shape) -> dict[str, ParameterSpec]:
        """Gain (features,)."""
        return {"gain": ParameterSpec(input[-1:], self.gain_init, input[-1], input[-1])}
'''

OF_THE_ENGINE = '''

class Gain(Layer, op="gain"):
    """Every feature, the last axis, times its gain, softly bounded."""

    def __init__(self, features, bound=2.0, gain_init="ones", name=None):
        super().__init__(name)
        self.features, self.bound, self.gain_init = features, bound, gain_init

    def parameters(self):
        return {"gain": ParameterSpec((self.features,), self.gain_init, self.features, self.features)}

    def output_shape(self, input_shape):
        return input_shape

    def forward(self, x, parameters, training):
        return ops.tanh(x * parameters["gain"]) * self.bound
'''

PROGRAM = """
import json
import numpy as np
from bridge import registry, spec, weights
from bridge.adapters.julia import describe
from bridge.session import Optimizer
from bridge.errors import SpecError

def made(**settings):
    layers = [{"id": "g", "op": "gain", **settings}, {"id": "output", "op": "dense", "units": 3}]
    header = {"format": "twingrad-model", "version": 1, "opset": 2, "name": "new", "input": {"shape": ["N", 4, 5]}}
    return spec.parse(header | {"layers": layers, "loss": {"op": "mean_squared_error"}})

def refusal(**settings):
    try:
        made(**settings)
    except SpecError as error:
        return str(error)

model = made(bound=3.0)
params = weights.initialise(model, 1)
weights.save("new.safetensors", params, {"seed": "1"})
params = weights.load("new.safetensors", model)
rng = np.random.default_rng(0)
x, y = rng.standard_normal((40, 4, 5), np.float32), rng.standard_normal((40, 4, 3), np.float32)
session = registry.get("numpy").build(model, params, Optimizer("sgd", 0.2), 8, "float32", 1)
losses = [session.train_epoch(x, y, np.arange(40)).mean() for _ in range(10)]
trained = session.params()
weights.save("trained.safetensors", trained)
trained_params = weights.load("trained.safetensors", model)
again = registry.get("numpy").build(model, trained_params, Optimizer("sgd", 0.2), 8, "float32", 1)
inside = 3.0 * np.tanh(x * trained["g.gain"])
print(json.dumps({
    "layer": repr(session.trainer.chain["g"]),
    "shapes": {name: array.shape for name, array in params.items()},
    "initial": params["g.gain"].tolist(),
    "moved": bool(np.all(trained["g.gain"] != 1)),
    "losses": [float(losses[0]), float(losses[-1])],
    "same": bool(np.array_equal(again.predict(x), session.predict(x))),
    "error": float(np.abs(inside @ trained["output.weight"] + trained["output.bias"] - session.predict(x)).max()),
    "julia": describe(model, Optimizer("sgd", 0.2), 8, np.dtype("float32"), 1).decode(),
    "dump": model.dump(),
    "schema": sorted(spec.json_schema()["$defs"]["Gain"]["properties"]),
    "refusals": [refusal(bond=3.0), refusal(bound=11.0), refusal(gain_init="glorot"), refusal(op="gian")],
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `PROGRAM` prints where the packages have the layer."""
    folder = tmp_path_factory.mktemp("packages")
    for package in ("bridge", "py_engine"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file, text in (("bridge/layers.py", OF_THE_SPEC), ("py_engine/network/layers.py", OF_THE_ENGINE)):
        with (folder / file).open("a", encoding="utf-8") as source:
            source.write(text)
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_a_layer_is_trained_with_its_settings(found: dict[str, Any]) -> None:
    assert found["layer"] == "Gain(5, bound=3.0, name='g')"
    assert found["losses"][1] < 0.9 * found["losses"][0]
    assert found["moved"]
    assert found["error"] < 1e-5


def test_its_parameters_have_names_and_shapes_in_files(found: dict[str, Any]) -> None:
    assert found["shapes"] == {"g.gain": [5], "output.weight": [5, 3], "output.bias": [3]}
    assert found["initial"] == [1.0] * 5
    assert found["same"]


def test_it_is_read_checked_and_written_as_all_others_are(found: dict[str, Any]) -> None:
    assert found["schema"] == ["bound", "gain_init", "id", "inputs", "op"]
    assert 'op = "gain"\nbound = 3.0\ngain_init = { name = "ones" }\n' in found["dump"]
    unknown, too_large, initialiser, op = found["refusals"]
    assert 'layers[0] (id "g").bond: unknown key (did you mean "bound"?), expected one of "id", "op", ' in unknown
    assert 'layers[0] (id "g").bound: found 11.0, expected a finite number above 0' in too_large
    assert 'layers[0] (id "g").gain_init: unknown name "glorot"' in initialiser
    assert 'layers[0] (id "g").op: unknown op "gian" (did you mean "gain"?), expected one of ' in op


def test_it_reaches_julia_as_a_line_with_its_settings(found: dict[str, Any]) -> None:
    assert "\nlayer id=g op=gain bound=3.0\nlayer id=output op=dense units=3 bias=true\n" in found["julia"]


def test_the_packages_themselves_are_as_they_were() -> None:
    assert "gain" not in LAYERS
    assert "gain" not in network.LAYERS
