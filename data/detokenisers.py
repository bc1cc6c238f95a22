"""Detokenisers: published test sets come as words with spaces between them; these undo that.

The rules are the standard ones of Megatron-LM's lineage, as the zero-shot perplexities of the SEDD
protocol use them, applied one after the other, in order. A rule is (pattern, replacement): a string
is replaced literally, everywhere and without overlaps, a compiled pattern as a regular expression.
"""

import re
from collections.abc import Iterable

Rule = tuple[str | re.Pattern, str]

WIKITEXT: tuple[Rule, ...] = (
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
    # spaces just inside a pair, shortest match
    (re.compile(r"\(\s*([^\)]*?)\s*\)"), r"(\1)"),
    (re.compile(r"\[\s*([^\]]*?)\s*\]"), r"[\1]"),
    (re.compile(r"\{\s*([^\}]*?)\s*\}"), r"{\1}"),
    (re.compile(r'"\s*([^"]*?)\s*"'), r'"\1"'),
    (re.compile(r"'\s*([^']*?)\s*'"), r"'\1'"),
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)

PTB: tuple[Rule, ...] = (
    (" 's", "'s"),
    ("s ' ", "s' "),
    (" n't", "n't"),
    (" \n ", "\n"),
    (r"\/", "/"),
    # one pass replaces every second N of "N N N N", whose spaces two matches would share
    *((" N ", " 1 "),) * 10,
    ("$ 1", "$1"),
    ("# 1", "#1"),
    ("<unk>", "?"),
)

LM1B: tuple[Rule, ...] = (
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
)


def apply(rules: Iterable[Rule], text: str) -> str:
    """`text` after all rules, in order."""
    for pattern, replacement in rules:
        if isinstance(pattern, str):
            text = text.replace(pattern, replacement)
        else:
            text = pattern.sub(replacement, text)
    return text


def wikitext(text: str) -> str:
    """A row of WikiText, as prose."""
    return apply(WIKITEXT, text)


def ptb(text: str) -> str:
    """A sentence of the Penn Treebank, as prose."""
    return apply(PTB, text)


def lm1b(text: str) -> str:
    """A sentence of the One Billion Word benchmark, as prose."""
    return apply(LM1B, text)


def lambada(text: str) -> str:
    """A passage of LAMBADA with straight double quotes, no white space around it, a newline before
    it."""
    return "\n" + text.replace("“", '"').replace("”", '"').strip()


def scientific_papers(text: str) -> str:
    """Of arXiv and PubMed, as published: the rules of WikiText, then those of LM1B."""
    return lm1b(wikitext(text))


DETOKENISERS = {
    "wikitext": wikitext,
    "ptb": ptb,
    "lm1b": lm1b,
    "lambada": lambada,
    "scientific_papers": scientific_papers,
}
