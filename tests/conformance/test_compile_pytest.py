"""Compile-only as pytest runs it: a test for each operator, implementation and target, and its kernels one by one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from plugin_package import installed, write

from kimi_hal_conformance.compiling.order import Order
from kimi_hal_conformance.compiling.sessions import CompileSession
from kimi_hal_conformance.pytest_plugin import pytest_configure

IMPLEMENTATIONS = """
from dataclasses import replace
from kimi_hal.dispatch.contract import Target

PLAIN = (kimi_hal_backend,)


@hookimpl
def kimi_hal_backend():
    return replace(PLAIN[0](), targets=(Target("a1x", "a1"), Target("a2x", "a2")))


def compiled(operator, name, function, arch=("a1", "a2")):
    capabilities = tuple(Capability(arch, covered) for covered in coverage(get(operator).spec_type))
    return covering(operator, name, capabilities=capabilities, compile=f"smithy_kernels:{function}")


IMPLEMENTATIONS = (
    compiled("merge_attn_states", "fast", "merge"),
    compiled("kda_gate", "narrow", "right", arch=("a1",)),
    covering("kda_decode", "torch"),
)
"""
KERNELS = """
import os
from kimi_hal.dispatch.contract import Compiled, Kernel


def kernel(name, target, code=""):
    return Kernel(name, lambda: Compiled(code or target.named, 2048, ("add",), registers=8, spilled=0, shared=0))


def merge(target):
    if target.name == "a1x":
        return [kernel("good", target)]
    return [kernel("good", target), kernel("other_code", target, "c9"), Kernel("aborts", os.abort)]


def right(target):
    return (kernel("only", target),)
"""


@pytest.fixture
def smithy(tmp_path: Path) -> Iterator[Path]:
    write(tmp_path, "smithy", IMPLEMENTATIONS, KERNELS)
    with installed(tmp_path):
        yield tmp_path


def pytest_run(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run the plugin in a folder of its own."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    junit = folder / "junit.xml"
    options = ["-c", "pytest.ini", "--rootdir", ".", "-p", "no:cacheprovider", f"--junitxml={junit}", "-rs"]
    command = [sys.executable, "-m", "pytest", *options, "--pyargs", "kimi_hal_conformance", *arguments]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "KIMI_HAL_"))}
    inherited.pop("CI", None)
    done = subprocess.run(command, cwd=folder, env=inherited, capture_output=True, text=True, timeout=120)
    return done, junit


def test_each_target_is_a_test_and_a_wrong_kernel_fails_it_by_name(smithy: Path) -> None:
    done, junit = pytest_run(smithy, "--kimi-backend", "smithy", "--kimi-compile-only")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "kimi-hal: backend smithy, compile-only, every target" in done.stdout
    assert "1 failed, 2 passed, 9 skipped" in done.stdout
    assert "no kernel for a2: it claims a1" in done.stdout
    (failure,) = ET.parse(junit).getroot().iter("failure")
    lines = str(failure.text).splitlines()
    assert lines[0] == "failed: smithy.fast compile/merge_attn_states/*/a2x"
    assert lines[1].startswith("compile/merge_attn_states/other_code/a2x: failed: ")
    assert lines[2] == (
        "replay: kimi-hal conformance run --backend smithy --compile-only --target a2x "
        "--implementation smithy.fast --case compile/merge_attn_states/other_code/a2x"
    )
    assert lines[3].startswith("compile/merge_attn_states/aborts/a2x: crashed: the process ended by SIGABRT")


def test_one_target_alone_is_compiled(smithy: Path) -> None:
    done, junit = pytest_run(
        smithy, "--kimi-backend", "smithy", "--kimi-compile-only", "--kimi-target", "a1x"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = [t.get("name") for t in ET.parse(junit).getroot().iter("testcase") if t.find("skipped") is None]
    assert names == [
        "test_case[smithy.narrow:compile/kda_gate/*/a1x]",
        "test_case[smithy.fast:compile/merge_attn_states/*/a1x]",
    ]


class Options:
    """A configuration of pytest as far as the plugin asks it."""

    def __init__(self, **given: object) -> None:
        self.given = {"backend": "smithy", "execution": "native", "profile": "", "implementation": ""}
        self.given |= {"case": [], "target": [], "compile-only": False, **given}

    def getoption(self, name: str) -> object:
        """Return an option."""
        return self.given[name.removeprefix("--kimi-")]


def compiling(**given: object) -> CompileSession:
    return CompileSession(cast(pytest.Config, Options(**given)))


def test_a_case_names_its_kernel_alone(smithy: Path) -> None:
    (item,) = compiling(case=["compile/merge_attn_states/good/a2x"]).items()
    assert isinstance(item.batch, Order)
    assert (item.id, item.batch.only) == ("smithy.fast:compile/merge_attn_states/*/a2x", ("good",))


def test_options_of_a_run_are_refused() -> None:
    with pytest.raises(pytest.UsageError) as error:
        compiling(profile="full", execution="interpreted")
    assert str(error.value) == (
        "--kimi-compile-only runs no case: leave out --kimi-execution, --kimi-profile"
    )


def test_a_target_needs_compile_only() -> None:
    with pytest.raises(pytest.UsageError) as error:
        pytest_configure(cast(pytest.Config, Options(target=["a1x"])))
    assert str(error.value) == "--kimi-target goes with --kimi-compile-only"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": ["a1"]}, "unknown target of smithy 'a1'; did you mean 'a1x'?"),
        ({"backend": "reference"}, "reference gives no targets"),
    ],
)
def test_what_does_not_exist_is_said(smithy: Path, given: dict[str, object], message: str) -> None:
    with pytest.raises(pytest.UsageError, match=re.escape(message)):
        compiling(**given).items()
