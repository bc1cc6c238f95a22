"""Learn a small byte-pair vocabulary from text, as data/english.tiktoken was:

    python data/learn_vocabulary.py data/stories.jsonl.xz --size 2047 --out data/english.tiktoken

It needs the package tokenizers. The file has a line for each id, in their order: the token's bytes
in base64, and the id. Texts are cut into words as GPT-2 cuts them.
"""

from __future__ import annotations

import base64
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from runtime.errors import UserError

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # where `data` is a package

import tyro
from annotated_types import Interval

from data.sources import TEXT_FILES, LocalFiles
from data.tokenizers import GPT2_WORDS
from runtime.command_line import run_script
from runtime.outputs import OutputOptions, Outputs
from runtime.validation import LARGEST, check_values


@dataclass(frozen=True, kw_only=True)
class Learn(OutputOptions):
    """What to learn from, and where to."""

    source: tyro.conf.Positional[tuple[Path, ...]]
    """Text files, or .jsonl files whose rows have a "text"."""
    out: Path
    """File to write."""
    size: Annotated[int, Interval(ge=256, le=LARGEST)] = 2047
    """Tokens, 256 of them single bytes; end-of-text comes on top."""


def learn(args: Learn) -> None:
    """Write the vocabulary file. Raises ValueError for a text with too few pairs."""
    try:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    except ImportError as error:
        raise UserError("this needs the package tokenizers: pip install tokenizers") from error
    check_values(args)
    outputs = Outputs({"--out": args.out}, args.source, args.overwrite)

    alphabet = pre_tokenizers.ByteLevel.alphabet()  # a printable character for every byte
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(GPT2_WORDS), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=args.size, initial_alphabet=alphabet, show_progress=False
    )
    texts = (text for text, _ in LocalFiles(args.source, TEXT_FILES, "text").pieces())
    tokenizer.train_from_iterator(texts, trainer)
    ranks = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if len(ranks) < args.size:
        raise UserError(f"the text has only {len(ranks)} tokens; give more text or a lower --size")
    byte_of = byte_of_character()
    lines = [
        base64.b64encode(bytes(byte_of[c] for c in token)) + b" %d\n" % i
        for i, (token, _) in enumerate(ranks)
    ]
    with outputs:
        outputs.write(args.out, b"".join(lines))


def byte_of_character() -> dict[str, int]:
    """What the characters of a byte-level vocabulary stand for: printable Latin-1 for itself, the
    other bytes, in order, for the characters from U+0100 on (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


if __name__ == "__main__":
    run_script(lambda: learn(tyro.cli(Learn, description=__doc__)))
