"""Detokenisers: published test sets come as words with spaces between them; these undo
that.

The rules are the standard ones of Megatron-LM's lineage, as the zero-shot perplexities
of the SEDD protocol use them, applied in order. A rule is (pattern, replacement): a
string is replaced literally, everywhere and without overlaps, a compiled pattern as a
regular expression."""

import re

# Spaces just inside a pair of brackets or quotes, shortest match.
PAIRS = [
    (re.compile(rf"\{a}\s*([^\{b}]*?)\s*\{b}"), rf"{a}\1{b}")
    for a, b in ("()", "[]", "{}", '""', "''")
]
WIKITEXT = [
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    (" : ", ": "),
    (" ; ", "; "),
    (" . ", ". "),
    (" ! ", "! "),
    (" ? ", "? "),
    (" , ", ", "),
    *PAIRS,
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
]
PTB = [
    (" 's", "'s"),
    ("s ' ", "s' "),
    (" n't", "n't"),
    (" \n ", "\n"),
    (r"\/", "/"),
    # One pass replaces every second N of "N N N N", whose spaces two matches would
    # share.
    *[(" N ", " 1 ")] * 10,
    ("$ 1", "$1"),
    ("# 1", "#1"),
    ("<unk>", "?"),
]
LM1B = [
    ("http : / / ", "http://"),
    ("https : / / ", "https://"),
    (re.compile(r" '(\w+)"), r"'\1"),
    (re.compile(r" (\w+) \. "), r" \1. "),
    (re.compile(r" (\w+) \.$"), r" \1."),
    (" ? ", "? "),
    (re.compile(r" \?$"), "?"),
    (" ! ", "! "),
    (re.compile(r" \!$"), "!"),
    (" , ", ", "),
    (" : ", ": "),
    (" ; ", "; "),
    (" / ", "/"),
    (re.compile(r'" ([^"]+) "'), r'"\1"'),
    (re.compile(r"' ([^']+) '"), r"'\1'"),
    (re.compile(r"\( ([^\(\)]+) \)"), r"(\1)"),
    (re.compile(r"\[ ([^\[\]]+) \]"), r"[\1]"),
    ("$ ", "$"),
    ("£ ", "£"),
]
# A passage has straight quotes, no white space around it and a newline before it.
LAMBADA = [
    ("“", '"'),
    ("”", '"'),
    (re.compile(r"\s+\Z"), ""),
    (re.compile(r"\A\s*"), "\n"),
]
RULES = {
    "wikitext": WIKITEXT,
    "ptb": PTB,
    "lm1b": LM1B,
    "lambada": LAMBADA,
    "scientific_papers": WIKITEXT + LM1B,
}


def detokenise(name: str | None, text: str) -> str:
    """Return `text` after the rules of this name, in order; None: as it is."""
    for pattern, replacement in RULES[name] if name else ():
        if isinstance(pattern, str):
            text = text.replace(pattern, replacement)
        else:
            text = pattern.sub(replacement, text)
    return text
