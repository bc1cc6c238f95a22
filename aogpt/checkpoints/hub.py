"""A folder that `transformers` loads without this repository, as `convert.py --hub`
writes it.

config.json          settings, and where transformers finds the code
model.safetensors    weights
modeling_aogpt.py    a copy of sampling/hub_model.py; the other .py files are copies of
                     what it imports of the package
tokenizer.json       the tokenizer, with [MASK]; beside it tokenizer_config.json
generation_config.json  the id that ends a text
README.md            a model card: checkpoints/model_card.py"""

import re
from pathlib import Path
from typing import NamedTuple

from ..data.tokenizers import (
    ALPHABET,
    END_OF_TEXT,
    GPT2_WORDS,
    HUB,
    HUB_SETTINGS,
    SOURCE,
    HubTokenizer,
    Tokenizer,
    source_record,
)
from ..runtime.errors import UserError
from ..runtime.files import write_json, write_text
from .load import Loaded
from .model_card import model_card

PACKAGE = Path(__file__).resolve().parents[1]
# Each file of code in the folder, and the file of the package that it is a copy of.
CODE = {
    "modeling_aogpt.py": "sampling/hub_model.py",
    "cached.py": "sampling/cached.py",
    "encoder.py": "systems/encoder.py",
    "errors.py": "runtime/errors.py",
    "kinds.py": "systems/kinds.py",
    "mask_query.py": "systems/mask_query.py",
    "model.py": "model.py",
    "parameters.py": "systems/parameters.py",
    "queries.py": "systems/queries.py",
    "race.py": "sampling/race.py",
    "scoring.py": "scoring.py",
    "simple.py": "sampling/simple.py",
    "two_stream.py": "systems/two_stream.py",
}
MODULE = "modeling_aogpt"
AUTO_MAP = {
    "AutoConfig": f"{MODULE}.AOGPTConfig",
    "AutoModel": f"{MODULE}.AOGPTModel",
    "AutoModelForCausalLM": f"{MODULE}.AOGPTForCausalLM",
}
LICENCE = "MIT License. Copyright (c) 2026 the AO-GPT authors"
MASK = "[MASK]"


def write_hub_files(
    folder: Path, loaded: Loaded, export: dict, dtype: str, rows: list[dict]
) -> None:
    """Write everything but the weights. export: the config.json of an export. rows: the
    rows of metrics.jsonl."""
    tokens = write_tokenizer(folder, loaded.get_tokenizer())
    settings = {
        "model_type": "aogpt",
        "architectures": ["AOGPTModel"],
        "auto_map": AUTO_MAP,
        "mask_token_id": tokens.mask,
    }
    if tokens.start is not None:
        settings["start_token_id"] = tokens.start
    settings["dtype"] = dtype
    settings["aogpt"] = export
    write_json(folder / "config.json", settings)
    write_code(folder)
    card = model_card(
        loaded,
        rows,
        writes_start=tokens.start is not None,
        adds_space=tokens.adds_space,
    )
    write_text(folder / "README.md", card)


def write_code(folder: Path) -> None:
    """Write copies of the package's files, whose relative imports name files of the
    same folder: transformers copies no other."""
    for name, source in CODE.items():
        text = (PACKAGE / source).read_text()
        text = re.sub(r"^from \.+(\w+\.)*(?=\w+ import )", "from .", text, flags=re.M)
        header = (
            f"# {LICENCE}\n"
            f"# A copy of aogpt/{source} of the AO-GPT project: change that, not "
            "this.\n\n"
        )
        write_text(folder / name, header + text)


class SpecialTokens(NamedTuple):
    """What transformers' tokenizer adds to a text."""

    mask: int  # id of [MASK], the first one after the vocabulary
    start: int | None  # id of the begin-of-text that it writes, None without one
    adds_space: bool  # to the text after each [MASK], as to the beginning of a text


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> SpecialTokens:
    """Write tokenizer.json and its settings for `transformers.AutoTokenizer`, and a
    vocabulary of the user's as it was."""
    try:
        import tokenizers
        import transformers  # noqa: F401
    except ImportError:
        raise UserError("--hub needs a package: pip install transformers") from None

    if tokenizer.name.startswith(ALPHABET):
        raise UserError(
            "--hub is for models of text, and this one is of letters of an alphabet: "
            "leave it out"
        )
    tokenizer.keep(folder)
    start = None
    if tokenizer.name == HUB:
        # Its file has no [MASK]; transformers adds it, as the next lines here.
        library = tokenizers.Tokenizer.from_str(tokenizer.file.decode())
        library.add_special_tokens([MASK])
        if library.token_to_id(MASK) != tokenizer.vocab_size:
            raise UserError(
                "--hub cannot add [MASK]: the ids of its tokenizer.json have holes"
            )
        if tokenizer.starts:
            start = tokenizer.starts[0]
    else:
        library = library_tokenizer(tokenizer)
        write_text(folder / HUB, library.to_str(pretty=True))
    write_tokenizer_settings(folder, tokenizer, MASK)
    mask = library.token_to_id(MASK)
    ids = library.encode(f"a{MASK} a", add_special_tokens=False).ids
    after = ids[ids.index(mask) + 1 :]
    adds_space = after != tokenizer.encode_after(" a")
    return SpecialTokens(mask, start, adds_space)


def file_that_writes_starts(tokenizer: HubTokenizer) -> bytes:
    """Return the tokenizer.json of a tokenizer, which itself writes the tokens before a
    text: the library does not heed `add_bos_token` beside it. Raises UserError for one
    that writes other tokens already, beside which the library has no place for them."""
    from tokenizers import Tokenizer as Library
    from tokenizers import processors

    library = Library.from_str(tokenizer.file.decode())
    count = len(tokenizer.starts)
    written = library.encode("").ids
    if written[:count] == tokenizer.starts:
        return tokenizer.file
    starts = tokenizer.start_tokens
    if written or library.num_special_tokens_to_add(is_pair=True):
        raise UserError(
            f"its {HUB} writes special tokens, but not {' '.join(starts)}, with which "
            f"{HUB_SETTINGS} begins a text: add it to the post_processor"
        )
    template = processors.TemplateProcessing(
        single=[*starts, "$A"],
        pair=[*starts, "$A", *starts, "$B:1"],
        special_tokens=list(zip(starts, tokenizer.starts, strict=True)),
    )
    steps = [template]
    if library.post_processor is not None:
        steps.insert(0, library.post_processor)
    library.post_processor = processors.Sequence(steps)
    return library.to_str().encode()


def write_tokenizer_settings(
    folder: Path, tokenizer: Tokenizer, mask: str | None = None
) -> None:
    """Write tokenizer_config.json and generation_config.json beside the tokenizer.json
    of a folder, which from then on writes begin-of-text itself. A text is padded with
    its end, which the attention mask hides, on the left, as the library's `generate`
    needs it; `generate` stops at the end."""
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(folder / HUB))
    end = library.id_to_token(tokenizer.eot)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": end,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    if mask is not None:
        settings["mask_token"] = mask
    if isinstance(tokenizer, HubTokenizer) and tokenizer.starts:
        settings["bos_token"] = library.id_to_token(tokenizer.starts[0])
        settings["add_bos_token"] = True
        written = file_that_writes_starts(tokenizer)
        if written != tokenizer.file or tokenizer.source:
            (folder / HUB).write_bytes(written)
            settings[SOURCE] = source_record(written, tokenizer.sha256)
    write_json(folder / HUB_SETTINGS, settings)
    ends = {"eos_token_id": tokenizer.eot, "pad_token_id": tokenizer.eot}
    write_json(folder / "generation_config.json", ends)


def library_tokenizer(tokenizer: Tokenizer):
    """Return a tokenizer of ours as a `tokenizers.Tokenizer` with the same ids, and
    [MASK] after them. It reads "<|endoftext|>" as the end of a text."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    converter = TikTokenConverter(
        pattern=GPT2_WORDS, extra_special_tokens=[END_OF_TEXT, MASK]
    )
    # the ranks are in memory already
    converter.load_tiktoken_bpe = lambda file: tokenizer.ranks
    library = converter.converted()
    assert library.token_to_id(END_OF_TEXT) == tokenizer.eot
    return library
