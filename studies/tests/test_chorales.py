"""Bach's chorales: crops, tokens, music files, and the scripts on them."""

import json
import struct
from itertools import islice
from xml.etree import ElementTree

import helpers
import numpy as np
import pytest
from study_data import prepared_study

import eval_ppl
import sample
import train
from aogpt.data.loader import TokenDataset, load_meta, read_tokens
from aogpt.data.tokenizers import get_tokenizer
from aogpt.runtime.errors import UserError
from studies import music, prepare
from studies.chorales import CROP, TOKENIZER, VOICES, pitches_of
from studies.music import BAR, TICKS, midi_file, piano_rolls

NOTES = get_tokenizer(str(TOKENIZER))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a file of random chorales whose voices span 13 semitones and are silent
    once in a while, the chorales of each split, and the prepared folder."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("source") / "made.json"
    lengths = {"train": (100, 40), "valid": (70,), "test": (33, 90)}
    low = [[60, 55, 48, 41]]
    chorales_by_split = {}
    for split, sizes in lengths.items():
        chorales = []
        for size in sizes:
            chorales.append(low + rng.integers(0, 13, (size, 4)))
        chorales_by_split[split] = chorales
    chorales_by_split["train"][1][:, 0] = 78  # goes up by 3 at most
    for chorales in chorales_by_split.values():
        for chorale in chorales:
            chorale[rng.random(chorale.shape) < 0.02] = -1
    path.write_text(json.dumps(chorales_by_split, default=np.ndarray.tolist))
    folder = prepared_study("chorales", path.with_name("all"), path, tokenizer=None)
    return path, chorales_by_split, folder


def transposed(crop, shifts):
    """Return a crop in several keys; silence (-1) stays."""
    is_silent = crop < 0
    return [np.where(is_silent, -1, crop + shift) for shift in shifts]


def test_crops_are_of_one_chorale_and_of_training_in_all_keys_within_the_range(source):
    _, chorales_by_split, folder = source
    long, high = chorales_by_split["train"]
    (val,) = chorales_by_split["valid"]
    test, last = chorales_by_split["test"]
    expected = {
        "train": [],
        "val": [val[:32], val[32:64]],
        "test": [test[:32], last[:32], last[32:64]],
    }
    for start in range(0, 69, 16):
        crop = long[start : start + CROP]
        expected["train"] += transposed(crop, range(-5, 7))
    expected["train"] += transposed(high[:CROP], range(-5, 4))
    for split, crops in expected.items():
        tokens = read_tokens(folder, split, verify=True)
        pitches = pitches_of(tokens.tolist())
        assert pitches == np.array(crops).flatten().tolist()
    assert load_meta(folder)["source"][0]["transpositions"] == [*range(-5, 7)]
    assert not TokenDataset(folder, "train", 128).of_records  # no prompts: as text


@pytest.mark.slow(reason="reads the published file")
def test_crops_of_the_published_file_are_counted_as_the_documentation_says(
    real_data, tmp_path
):
    if not (path := real_data / "chorales" / "Jsb16thSeparated.json.xz").exists():
        pytest.skip("AOGPT_DATA has no chorales")
    folder = prepared_study("chorales", tmp_path / "real", path, tokenizer=None)
    splits = load_meta(folder)["splits"]
    counts = [splits[split]["documents"] for split in ("train", "val", "test")]
    assert counts == [35_502, 552, 570]
    assert NOTES.decode(read_tokens(folder, "test")[:8]) == "F4 C4 A3 F3 F4 C4 A3 F3"


def test_text_is_notes_with_white_space_between_them_and_is_read_back():
    all_notes = list(range(47))
    assert NOTES.encode(NOTES.decode(all_notes)) == all_notes
    assert NOTES.encode("r C2 A5\nC4  A#3") == [0, 1, 46, 25, 23]
    assert NOTES.vocab_size == 48
    assert NOTES.eot == 47
    assert NOTES.starts == []
    assert pitches_of([0, 1, 46, 25, 47]) == [-1, 36, 81, 60, -1]
    for wrong in ("C6", "B1", "H4", "c4", "Bb4", "</s>"):
        with pytest.raises(UserError, match="cannot encode 'C4 "):
            NOTES.encode(f"C4 {wrong}")


def notes_of(data):
    """Return {name: [(pitch, start, length)]} of the tracks of a MIDI file, in
    sixteenths."""
    assert data[:14] == b"MThd" + struct.pack(">IHHH", 6, 1, 4, 4 * TICKS)
    tracks = {}
    for chunk in data[14:].split(b"MTrk")[1:]:
        assert int.from_bytes(chunk[:4], "big") == len(chunk) - 4
        stream = iter(chunk[4:])
        now = 0  # in ticks
        meta = {}
        notes = []
        starts = {}  # of the notes that sound, by pitch
        while 0x2F not in meta:  # the end of a track
            delta = 0
            byte = next(stream)
            while byte & 0x80:
                delta = (delta | byte & 0x7F) << 7
                byte = next(stream)
            now += delta | byte
            status = next(stream)
            key = next(stream)
            if status == 0xFF:
                length = next(stream)
                meta[key] = bytes(islice(stream, length))
            elif status >> 4 != 0xC:  # no program change: a note with a velocity
                velocity = next(stream)
                if velocity:
                    starts[key] = now
                elif status >> 4 == 8:
                    start = starts.pop(key)
                    notes.append((key, start // TICKS, (now - start) // TICKS))
        assert not starts
        assert not [*stream]
        tracks[meta[3].decode()] = notes
    return tracks


def test_a_music_file_has_a_track_a_voice_and_joins_equal_pitches():
    one = [72, 67, 60, 48, 72, 65, -1, 48, 71, 65, 60, 48, 71, -1, 60, 48]
    then = 4 + BAR
    two = [70] * 300 * 4 + [70]  # a length of three bytes, and a voice that goes on
    voices = [
        [(72, 0, 2), (71, 2, 2), (70, then, 301)],
        [(67, 0, 1), (65, 1, 2), (70, then, 300)],
        [(60, 0, 1), (60, 2, 2), (70, then, 300)],
        [(48, 0, 4), (70, then, 300)],
    ]
    expected = dict(zip(VOICES, voices, strict=True))
    notes = notes_of(midi_file([one, two]))
    assert list(notes.items()) == list(expected.items())


def test_three_voices_given_the_fourth_is_scored_and_written(source, script, tmp_path):
    path, _, folder = source
    ids = read_tokens(folder, "test")
    alto = prepared_study(
        "chorales", tmp_path / "alto", path, predict=("alto",), tokenizer=None
    )
    decoder = helpers.tiny_config(folder, tmp_path, steps=6, model__block_size=128)
    encoder = helpers.tiny_config(alto, tmp_path, "encoder", 6, model__block_size=128)
    for one in (decoder, helpers.encoder_config(encoder)):
        assert train.train(one, helpers.ALONE) == 0
        scores = tmp_path / f"{one.name}.json"
        written = tmp_path / f"{one.name}.jsonl"
        words = ["--datasets", alto, "--split", "test", "--num-orders", 1]
        status, _, _ = script(eval_ppl, one.run_folder, *words, "--json", scores)
        assert status == 0
        assert json.loads(scores.read_text())["results"][-1]["tokens"] == 3 * CROP
        words = ["--prompts", alto, "--rows", 2, "--num-samples", 1]
        status, _, _ = script(sample, one.run_folder, *words, "--jsonl", written)
        assert status == 0
        [record] = helpers.read_lines(written)
        is_same = record["tokens"] == ids[128:256]
        same_voices = is_same.reshape(CROP, 4).all(axis=0)
        assert same_voices.tolist() == [True, False, True, True]
        assert record["prompt_index"] == 1
        assert record["prompt"].count("[MASK:1]") == CROP


def test_the_scripts_prepare_train_and_sample_voice_by_voice(source, tmp_path, printed):
    data = tmp_path / "data"
    voices = tmp_path / "voices.npy"
    said = printed(prepare, "chorales", "--source", source[0], "--out", data)
    config = "studies/configs/chorales.toml"
    assert f"next: python train.py {config} --name data --data.folder" in said
    assert "</s> (id 47) ends a document" in said
    assert "loses text" not in said
    short = "--train.steps 2 --optim.warmup-steps 1 --train.no-compile".split()
    printed(train, config, "--data.folder", data, "--out", tmp_path, *short)
    voice_by_voice = np.arange(128).reshape(32, 4).T
    np.save(voices, voice_by_voice.reshape(1, -1))
    rows = tmp_path / "made.jsonl"
    words = ["--num-samples", 1, "--jsonl", rows]
    printed(sample, tmp_path / "chorales", *words, "--mode", f"file:file={voices}")
    [record] = helpers.read_lines(rows)
    assert record["order"] == np.load(voices)[0].tolist()
    midi = tmp_path / "made.mid"
    svg = tmp_path / "made.svg"
    printed(music, rows, "--midi", midi, "--svg", svg)
    pitches = pitches_of(record["tokens"])
    assert midi.read_bytes() == midi_file([pitches])
    assert svg.read_text() == piano_rolls([pitches])


def test_a_piano_roll_has_a_column_a_sixteenth_and_a_row_a_pitch():
    rolls = [[72, 67, 67, 48, 74, 67, 60, -1], [60, -1, -1, -1]]
    picture = ElementTree.fromstring(piano_rolls(rolls))
    notes = []
    for note in picture:
        column = int(note.get("x")) // music.WIDTH
        row = int(note.get("y")) // music.HEIGHT
        voice = music.COLOURS.index(note.get("fill"))
        notes.append((note[0].text, column, row, voice))
    # The first roll has 27 rows, from D5 down to C3; two empty ones follow.
    assert notes == [
        ("C5", 0, 2, 0),
        ("G4", 0, 7, 1),
        ("G4", 0, 7, 2),
        ("C3", 0, 26, 3),
        ("D5", 1, 0, 0),
        ("G4", 1, 7, 1),
        ("C4", 1, 14, 2),
        ("C4", 0, 29, 0),
    ]
    assert picture.get("width") == str(2 * music.WIDTH)
    assert picture.get("height") == str((29 + 3) * music.HEIGHT)
