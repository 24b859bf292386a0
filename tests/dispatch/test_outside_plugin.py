"""A plugin from outside the repository: installed by pip, found, selected, run, and refused where it ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).parents[1] / "data" / "acme_plugin"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Install the plugin into a folder of its own, as a vendor's user would."""
    pytest.importorskip("pip", reason="installs a package")
    place = tmp_path_factory.mktemp("acme")
    shutil.copytree(SOURCE, place / "source")  # a build leaves files behind
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps"]
    command += ["--no-index", "--disable-pip-version-check", "--target", place / "site", place / "source"]
    subprocess.run(command, check=True)
    return place / "site"


def python(site, code, **variables):
    """Run code in a process that finds the plugin; return what it printed, as JSON."""
    clean = {n: v for n, v in os.environ.items() if not n.startswith("KIMI_HAL_")}
    paths = {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=clean | paths | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_is_found_without_importing_torch(site):
    found = python(
        site,
        """
        import json, sys
        from kimi_hal.dispatch.loader import load
        from kimi_hal.settings import Settings
        registry = load(Settings(backend="acme"))
        acme = registry.get("acme")
        names = [i.name for i in acme.implementations]
        devices = registry.probe("acme").devices
        print(json.dumps([acme.distribution, names, devices, "torch" in sys.modules]))
        """,
    )
    assert found == ["kimi-hal-acme 0.1.0", ["merge"], ["Acme simulator"], False]


RUN = """
    import json, sys, torch
    import kimi_hal as hal
    from kimi_hal.ops.sparse_mla import MergeSpec
    outs = torch.randn(3, 5, 4, 64, generator=torch.Generator().manual_seed(7))
    lses = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(8))
    outs[1], lses[1] = torch.nan, -torch.inf
    spec = MergeSpec(parts=3, num_heads=4, dim=64, dtype="float32", return_lse=True)
    plan = hal.plan("merge_attn_states", spec, device="cpu")
    reference = hal.plan("merge_attn_states", spec, device="cpu", implementation="reference.torch")
    (out, lse), (wanted, wanted_lse) = plan.run(outs, lses), reference.run(outs, lses)
    print(json.dumps({
        "name": plan.name,
        "why": plan.choice.why,
        "close": torch.allclose(out, wanted, atol=1e-6) and torch.allclose(lse, wanted_lse, atol=1e-6),
        "finite": bool(out.isfinite().all()),
        "source": len(plan.source_hash) > 0,
        "order": plan.built.context.settings,
    }))
"""


def test_it_is_selected_by_name_and_runs(site):
    assert python(site, RUN, KIMI_HAL_BACKEND="acme") == {
        "name": "acme.merge",
        "why": "KIMI_HAL_BACKEND=acme",
        "close": True,
        "finite": True,
        "source": True,
        "order": {},
    }


def test_it_is_found_by_auto_and_reads_its_own_variable(site):
    found = python(site, RUN, KIMI_HAL_ACME_ORDER="backward")
    assert (found["name"], found["why"]) == ("acme.merge", "auto found Acme simulator (acme_sim)")
    assert found["close"]
    assert found["order"] == {"KIMI_HAL_ACME_ORDER": "backward"}


REFUSED = """
    import json
    import kimi_hal as hal
    from kimi_hal.errors import KimiHalError
    from kimi_hal.ops.sparse_mla import MergeSpec
    try:
        hal.plan("merge_attn_states", MergeSpec(parts=9, num_heads=4, dim=96), device="cpu")
    except KimiHalError as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


def test_it_is_refused_where_its_capability_ends(site):
    assert python(site, REFUSED, KIMI_HAL_BACKEND="acme") == [
        "SelectionError",
        "merge_attn_states: no implementation of acme covers this request (KIMI_HAL_BACKEND=acme). "
        "KIMI_HAL_FALLBACK=reference runs the reference\n"
        "  acme.merge: parts=9 is not 1 to 8; dim=96 is not 64 to 512, a multiple of 64",
    ]


EXPLAINED = """
    import json
    import kimi_hal as hal
    from kimi_hal.errors import KimiHalError
    from kimi_hal.ops.sparse_mla import StoreLatentSpec
    try:
        print(json.dumps(hal.explain("store_latent", StoreLatentSpec(latent="latent.bf16")).why))
    except KimiHalError as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


def test_an_operator_that_it_lacks_is_refused(site):
    assert python(site, EXPLAINED, KIMI_HAL_BACKEND="acme") == (
        "store_latent: acme does not implement it (KIMI_HAL_BACKEND=acme); it implements merge_attn_states. "
        "KIMI_HAL_FALLBACK=reference runs the reference"
    )


def test_a_misspelt_variable_of_its_own_is_refused(site):
    assert python(site, EXPLAINED, KIMI_HAL_BACKEND="acme", KIMI_HAL_ACME_ODRER="backward") == [
        "SettingsError",
        "unknown variable KIMI_HAL_ACME_ODRER; did you mean 'KIMI_HAL_ACME_ORDER'? "
        "Declared by acme: KIMI_HAL_ACME_ORDER",
    ]


def test_its_misspelt_name_is_refused(site):
    name, message = python(site, EXPLAINED, KIMI_HAL_BACKEND="acne")
    assert name == "SettingsError"
    start = "KIMI_HAL_BACKEND: unknown backend 'acne'; did you mean 'acme'? Possible: auto, acme, "
    assert message.startswith(start)
