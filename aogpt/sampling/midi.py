"""Samples of four voices as a standard MIDI file of format 1: a track for each voice."""

from itertools import groupby
from struct import pack

from ..data.tokenizers import VOICES

TICKS = 24  # of a sixteenth
TEMPO = 60_000_000 // 80  # microseconds of a quarter
# choir; how loud; sixteenths of silence after a sample
PROGRAM = 52
VELOCITY = 80
BAR = 16


def midi_file(samples: list[list[int]]) -> bytes:
    """Samples one after the other. Each is MIDI pitches, -1 for a rest, of the voices in turn.
    Equal pitches that follow each other are one note."""
    lines: list[list[int]] = [[] for _ in VOICES]
    for pitches in samples:
        length = -(-len(pitches) // len(VOICES)) + BAR
        for voice, line in enumerate(lines):
            sung = pitches[voice :: len(VOICES)]
            line += sung + [-1] * (length - len(sung))
    tracks = [_track(voice, line) for voice, line in enumerate(lines)]
    header = b"MThd" + pack(">IHHH", 6, 1, len(tracks), 4 * TICKS)
    return header + b"".join(
        b"MTrk" + pack(">I", len(track)) + track for track in tracks
    )


def _track(voice: int, pitches: list[int]) -> bytes:
    data = b"\0" + _meta(3, VOICES[voice].encode()) + bytes([0, 0xC0 | voice, PROGRAM])
    if voice == 0:  # the tempo of all
        data += b"\0" + _meta(0x51, TEMPO.to_bytes(3, "big"))
    silence = 0
    for pitch, group in groupby(pitches):
        ticks = TICKS * len(list(group))
        if pitch < 0:
            silence += ticks
            continue
        data += _length(silence) + bytes([0x90 | voice, pitch, VELOCITY])
        data += _length(ticks) + bytes([0x80 | voice, pitch, 0])
        silence = 0
    return data + _length(silence) + _meta(0x2F, b"")  # the end of the track


def _meta(kind: int, content: bytes) -> bytes:
    return bytes([0xFF, kind, len(content)]) + content


def _length(ticks: int) -> bytes:
    """Seven bits a byte, all but the last with the highest bit set."""
    data = bytes([ticks & 0x7F])
    while ticks := ticks >> 7:
        data = bytes([ticks & 0x7F | 0x80]) + data
    return data
