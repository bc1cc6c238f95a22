"""A folder that `transformers` loads without this repository: what `convert.py --hub` writes.

config.json          settings, and where transformers finds the code
model.safetensors    weights
modeling_aogpt.py    the sources of the model, then sampling/hub_model.py, in one file
tokenizer.json       the tokenizer, with [MASK]
README.md            a model card
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

from data.tokenizers import END_OF_TEXT, GPT2_WORDS, BytePairTokenizer, Tokenizer

PROJECT = Path(__file__).resolve().parent.parent
SOURCES = ["model.py", "runtime/errors.py", "variants/chunked_head.py", "variants/scoring.py"]
SOURCES += ["variants/encoder.py", "variants/two_stream.py", "sampling/cached.py"]
SOURCES += ["sampling/race.py", "sampling/simple.py", "sampling/hub_model.py"]
AUTO_MAP = {"AutoConfig": "modeling_aogpt.AOGPTConfig", "AutoModel": "modeling_aogpt.AOGPTModel"}
MASK = "[MASK]"


def modeling_source() -> str:
    """The sources of the model in one file, without what imports them from one another."""
    packages = {path.parent.name for path in PROJECT.glob("*/__init__.py")} | {"model"}
    parts = ["from __future__ import annotations\n"]
    for name in SOURCES:
        text = (PROJECT / name).read_text()
        lines = text.splitlines(keepends=True)
        for node in ast.parse(text).body:
            if isinstance(node, ast.ImportFrom) and (
                node.module == "__future__" or node.module.split(".")[0] in packages
            ):
                lines[node.lineno - 1 : node.end_lineno] = [""] * (
                    node.end_lineno - node.lineno + 1
                )
        parts.append(f"# ---- {name} " + "-" * (93 - len(name)) + "\n\n" + "".join(lines))
    return "\n\n".join(parts)


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    """tokenizer.json and its settings, for `transformers.AutoTokenizer`."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    letters = byte_letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    ranks, merges, split = {bytes([i]): i for i in range(256)}, [], []
    if isinstance(tokenizer, BytePairTokenizer):
        ranks = tokenizer.ranks()
        pairs = [(merged_from(token, ranks), token) for token in ranks if len(token) > 1]
        pairs.sort(key=lambda pair: ranks[pair[1]])
        merges = [(spelled(left), spelled(right)) for (left, right), _ in pairs]
        split = [pre_tokenizers.Split(tokenizers.Regex(GPT2_WORDS), "isolated")]
    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*split, to_letters])
    made.decoder = decoders.ByteLevel()
    for name in (END_OF_TEXT, MASK):  # in this order: the next two ids
        made.add_special_tokens([tokenizers.AddedToken(name, normalized=False)])
    assert made.token_to_id(END_OF_TEXT) == tokenizer.eot
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "mask_token": MASK}
    settings |= {"eos_token": END_OF_TEXT, "clean_up_tokenization_spaces": False}
    return {
        "tokenizer.json": made.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(settings, indent=2),
    }


def merged_from(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that a token of a byte-pair encoding is merged from."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [parts[i] + parts[i + 1] for i in range(len(parts) - 1)]
        first = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], len(ranks)))
        parts[first : first + 2] = [pairs[first]]
    return parts[0], parts[1]


def byte_letters() -> list[str]:
    """The printable character that stands for each byte in GPT-2's vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
