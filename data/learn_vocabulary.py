"""Learn a small byte-pair vocabulary from text, as data/english.tiktoken was:

    python data/learn_vocabulary.py data/stories.jsonl.xz --size 2047 --out data/english.tiktoken

The file has a line for each id, in order: the token's bytes in base64, and the id. It needs the
package tokenizers.
"""

from __future__ import annotations

import base64
import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # where `data` is a package

import tyro

from data.sources import TEXT_FILES, local_files
from data.tokenizers import GPT2_WORDS
from runtime.command_line import run_script
from runtime.errors import UserError
from runtime.outputs import OutputOptions, Outputs
from runtime.validation import Count, check_values


@dataclass(frozen=True, kw_only=True)
class Learn(OutputOptions):
    source: tyro.conf.Positional[tuple[Path, ...]]
    """Text files, or .jsonl files whose rows have a "text"."""
    out: Path
    """File to write."""
    size: Count = 2047
    """Tokens, 256 of them single bytes; end-of-text comes on top."""


def learn(args: Learn) -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    check_values(args)
    with Outputs({"--out": args.out}, args.source, args.overwrite) as outputs:
        tokenizer = Tokenizer(models.BPE())
        words = pre_tokenizers.Split(Regex(GPT2_WORDS), behavior="isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
        alphabet = as_bytes.alphabet()  # a printable character for every byte
        options = {"vocab_size": args.size, "initial_alphabet": alphabet, "show_progress": False}
        texts = (text for text, _ in local_files(args.source, TEXT_FILES, "text").pieces())
        tokenizer.train_from_iterator(texts, trainers.BpeTrainer(**options))
        tokens = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
        if len(tokens) < args.size:
            raise UserError(f"it has only {len(tokens)} tokens; give more text or a lower --size")
        # As in GPT-2, printable Latin-1 is itself, and U+0100... are the other bytes in order.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = sorted(set(range(256)) - set(printable))
        byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
        coded = (base64.b64encode(bytes(byte_of[c] for c in token)) for token in tokens)
        outputs.write(args.out, b"".join(code + b" %d\n" % i for i, code in enumerate(coded)))


if __name__ == "__main__":
    run_script(lambda: learn(tyro.cli(Learn, description=__doc__)))
