"""The picture on README: the sentence of its last command as it fills in.

python -m studies.filling      # writes docs/filling.svg
"""

import html

import aogpt
from aogpt.runtime.command_line import run_script, show
from aogpt.runtime.files import write_text
from aogpt.text_model import Sample
from studies.runs import ROOT

MODEL = ROOT / "results" / "books_model"
TEXT = "She opened the door,[MASK:6] and he took off his hat."
FILE = ROOT / "docs" / "filling.svg"
STATES = 4  # rows of the picture
CHARACTER = 8.4  # width in pixels
ROW = 60
LEFT = 24
STYLE = (
    'text{font:14px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;'
    "fill:#1f2328}.label{font:12px system-ui,sans-serif;fill:#59636e}"
    ".new{fill:#0550ae;font-weight:600}"
)


def main() -> None:
    model = aogpt.load(str(MODEL))
    (sample,) = model.fill([TEXT], mode="confidence", seed=1)
    tokens = [model.tokenizer.decode([token]) for token in sample.tokens]
    gap = int(TEXT.partition("[MASK:")[2].partition("]")[0])
    write_text(FILE, picture(tokens, sample, gap))
    show(f"wrote {FILE}: {sample.text}")


def picture(tokens: list[str], sample: Sample, gap: int) -> str:
    """Return an SVG with a row for each state of a sample, from the given text to the
    whole one; `gap` tokens, the last of its order, are filled in."""
    filled = sample.order[-gap:]
    width = 2 * LEFT + round(CHARACTER * sum(map(len, tokens)))
    height = STATES * ROW + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" '
        'aria-label="A sample filling in: the most confident positions come first">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff" rx="6" '
        'stroke="#d0d7de"/>',
    ]
    for row in range(STATES):
        count = round(row * gap / (STATES - 1))
        parts += row_of(tokens, filled, count, row * ROW + 24)
    return "\n".join([*parts, "</svg>", ""])


def row_of(tokens: list[str], filled: list[int], count: int, top: float) -> list[str]:
    """Return the elements of a state: `count` of the tokens of the gap are there."""
    label = f"after {count} tokens"
    if count == 0:
        label = f"given text, {len(filled)} tokens to fill in"
    elif count == len(filled):
        label = "complete"
    elements = [f'<text x="{LEFT}" y="{top:g}" class="label">{label}</text>']
    x = float(LEFT)
    for position, token in enumerate(tokens):
        size = CHARACTER * len(token)
        place = filled.index(position) if position in filled else -1
        if place >= count:
            elements.append(
                f'<rect x="{x + 1.5:.1f}" y="{top + 11:g}" width="{size - 3:.1f}" '
                'height="16" rx="3" fill="#d0d7de"/>'
            )
        else:
            kind = "new" if place >= 0 else "given"
            if place >= 0:
                elements.append(
                    f'<rect x="{x:.1f}" y="{top + 9:g}" width="{size:.1f}" '
                    'height="20" fill="#ddeeff"/>'
                )
            elements.append(
                f'<text x="{x:.1f}" y="{top + 24:g}" class="{kind}" '
                f'xml:space="preserve">{html.escape(token)}</text>'
            )
        x += size
    return elements


if __name__ == "__main__":
    run_script(main)
