"""Commands with options that mean nothing: a sentence and a status, never a traceback."""

from __future__ import annotations

from click.testing import CliRunner

from kimi_hal.cli.main import cli
from kimi_hal.errors import SpecError


def test_a_field_that_is_an_object_where_a_number_belongs_is_a_sentence():
    result = CliRunner().invoke(cli, ["explain", "sparse_mla", "--spec", '{"num_heads": {"a": 1}}'])
    assert isinstance(result.exception, SpecError)  # which main() prints
    assert str(result.exception) == (
        "SparseMLASpec: num_heads must be int, got dict {'a': 1}; num_heads={'a': 1} is not 1 to 128"
    )
