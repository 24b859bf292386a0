"""The encoder's tokenizer, with the truncation that its package switches on switched off."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kimi_hal.errors import KimiHalError
from kimi_hal_conformance.workload import package

#: What makes a word readable: its letters, and how often the text has it before.
LETTERS, TIMES = 5, 8


class Tokens(NamedTuple):
    """Vocabulary ids, first characters and lengths in characters, each ``[S]`` int64."""

    ids: Tensor
    start: Tensor
    length: Tensor


def tokenize(content: str, least: int = 0, folder: Path | None = None) -> Tokens:
    """Split a text into the encoder's word pieces, without the marks that begin and end a sentence.

    The tokenizer file says to cut after 128 tokens and to pad to as many; neither is wanted here.

    Args:
        content: the text.
        least: the tokens that the text must have at least; all are returned.
        folder: where ``tokenizer.json`` lies; default the installed package.

    Raises:
        KimiHalError: the text has fewer tokens than ``least``, or what reads it is not installed.
    """
    tokenizer = _tokenizer(folder or package.folder())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    coded = tokenizer.encode(content, add_special_tokens=False)
    if len(coded.ids) < least:
        raise KimiHalError(f"the text has {len(coded.ids):,} tokens, {least:,} were asked for; ask for fewer")
    spans = torch.tensor(coded.offsets, dtype=torch.int64).view(-1, 2)
    return Tokens(torch.tensor(coded.ids), spans[:, 0], spans[:, 1] - spans[:, 0])


def window(tokens: Tokens, content: str, size: int, slack: int = 512) -> Tokens:
    """Return ``size`` consecutive tokens that end with a word one can read a selection by.

    The first window, at most ``slack`` tokens into the text, whose last token is a whole word of five letters
    or more and stands in it at least eight times before; the very first window if there is none. A decode
    step's query is the last token.
    """
    for first in range(min(slack, len(tokens.ids) - size) + 1):
        part = Tokens(*(t[first : first + size] for t in tokens))
        if _is_word(content, int(part.start[-1]), int(part.length[-1])) and _repeats(part.ids):
            return part
    return Tokens(*(t[:size] for t in tokens))


def _is_word(content: str, start: int, length: int) -> bool:
    around = content[max(start - 1, 0) : start] + content[start + length : start + length + 1]
    return length >= LETTERS and content[start : start + length].isalpha() and not any(map(_joins, around))


def _joins(character: str) -> bool:
    return character.isalnum() or character == "_"


def _repeats(ids: Tensor) -> bool:
    return int((ids[:-1] == ids[-1]).sum()) >= TIMES


def _tokenizer(folder: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise KimiHalError(f"tokenizers is not installed: {package.INSTALL}") from error
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
