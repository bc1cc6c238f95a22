"""Samples of a model of chorales as music: a MIDI file, and a piano roll to look at.

    python sample.py out/chorales --jsonl chorales.jsonl
    python -m studies.music chorales.jsonl --midi chorales.mid --svg chorales.svg

The MIDI file has format 1: a track for each voice."""

import math
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from struct import pack
from typing import Annotated

import tyro

from aogpt.runtime.command_line import run_script, with_help
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import read_lines
from aogpt.runtime.outputs import OutputOptions, Outputs
from aogpt.runtime.validation import from_json
from studies.chorales import REST, VOICES, name_of, pitches_of

TICKS = 24  # in a sixteenth
TEMPO = 60_000_000 // 80  # microseconds in a quarter
PROGRAM = 52  # choir
VELOCITY = 80  # how loud
BAR = 16  # sixteenths of silence after a sample
# The piano roll: width of a sixteenth and height of a semitone in pixels, and a colour
# for each voice.
WIDTH = 22
HEIGHT = 12
COLOURS = ("#d33682", "#cb7b16", "#2aa198", "#268bd2")


@dataclass(frozen=True, kw_only=True)
class Arguments(OutputOptions):
    samples: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.jsonl")]
    """Samples, as sample.py --jsonl writes them."""
    midi: Path | None = None
    """Write the samples, one after the other, to a MIDI file."""
    svg: Path | None = None
    """Write a picture with a piano roll for each sample."""


def main() -> None:
    a = tyro.cli(with_help(Arguments), description=__doc__)
    if not (a.midi or a.svg):
        raise UserError("give --midi FILE, --svg FILE or both")
    samples = []
    for place, line in read_lines(a.samples):
        sample = from_json(line, dict, place)
        samples.append(pitches_of(sample["tokens"]))
    files = {"--midi": a.midi, "--svg": a.svg}
    with Outputs(files, [a.samples], a.overwrite) as outputs:
        if a.midi:
            outputs.write(a.midi, midi_file(samples))
        if a.svg:
            outputs.write(a.svg, piano_rolls(samples))


def midi_file(samples: list[list[int]]) -> bytes:
    """Return samples one after the other as a MIDI file. Each is MIDI pitches, REST for
    silence, of the voices in turn. Equal pitches that follow each other are one
    note."""
    lines: list[list[int]] = [[] for _ in VOICES]
    for pitches in samples:
        length = math.ceil(len(pitches) / len(VOICES)) + BAR
        for voice, line in enumerate(lines):
            sung = pitches[voice :: len(VOICES)]
            line += sung + [REST] * (length - len(sung))
    data = b"MThd"
    data += pack(">IHHH", 6, 1, len(lines), 4 * TICKS)
    for voice, line in enumerate(lines):
        track = _track(voice, line)
        data += b"MTrk"
        data += pack(">I", len(track))
        data += track
    return data


def _track(voice: int, pitches: list[int]) -> bytes:
    """Return the events of a voice, each after the ticks since the one before."""
    name = VOICES[voice].encode()
    program = bytes([0xC0 | voice, PROGRAM])
    data = _length(0) + _meta(3, name)
    data += _length(0) + program
    if voice == 0:  # the tempo of all
        tempo = TEMPO.to_bytes(3, "big")
        data += _length(0) + _meta(0x51, tempo)
    silence = 0
    for pitch, group in groupby(pitches):
        ticks = TICKS * len(list(group))
        if pitch == REST:
            silence += ticks
            continue
        start = bytes([0x90 | voice, pitch, VELOCITY])
        end = bytes([0x80 | voice, pitch, 0])
        data += _length(silence) + start
        data += _length(ticks) + end
        silence = 0
    return data + _length(silence) + _meta(0x2F, b"")  # the end of the track


def _meta(kind: int, content: bytes) -> bytes:
    return bytes([0xFF, kind, len(content)]) + content


def _length(ticks: int) -> bytes:
    """Return a number in seven bits a byte, all but the last with the highest bit
    set."""
    data = bytes([ticks & 0x7F])
    while ticks := ticks >> 7:
        data = bytes([ticks & 0x7F | 0x80]) + data
    return data


def piano_rolls(samples: list[list[int]]) -> str:
    """Return an SVG picture: samples below each other, in which a column is a
    sixteenth, a row a pitch and a colour a voice. Rests are left out."""
    notes = []
    top = 0
    columns = 0
    for pitches in samples:
        sung = [pitch for pitch in pitches if pitch != REST]
        if not sung:
            continue
        for place, pitch in enumerate(pitches):
            if pitch != REST:
                column, voice = divmod(place, len(VOICES))
                row = top + max(sung) - pitch
                note = _note(column, row, COLOURS[voice], name_of(pitch))
                notes.append(note)
        columns = max(columns, math.ceil(len(pitches) / len(VOICES)))
        top += max(sung) - min(sung) + 3
    size = f'width="{columns * WIDTH}" height="{top * HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{"".join(notes)}</svg>\n'


def _note(column: int, row: int, colour: str, name: str) -> str:
    x = column * WIDTH
    y = row * HEIGHT
    return (
        f'<rect x="{x}" y="{y}" width="{WIDTH - 1}" height="{HEIGHT - 1}" '
        f'fill="{colour}" fill-opacity="0.7"><title>{name}</title></rect>\n'
    )


if __name__ == "__main__":
    run_script(main)
