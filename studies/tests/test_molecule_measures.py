"""Measures of models of molecules, and the page of their rows."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import (
    change,
    encoder_config,
    read_lines,
    run_main,
    tiny_config,
    write_config,
    write_rows,
)
from test_molecules import TEXTS, statistics, write_wheel

pytest.importorskip("rdkit")
pytest.importorskip("fcd")

import train
from studies import molecule_measures, molecule_page, molecules
from studies.molecule_measures import (
    Measuring,
    Sizes,
    filled_by_gpt,
    holes_of,
    measure_samples,
    shares,
    unknown_around_scaffold,
    unknown_ring_system,
)
from studies.molecule_parts import owners, unknown_letters, with_masks
from studies.molecule_runs import Claim, load_runs

SIZES = Sizes(samples=6, nats=4, orders=2, holes=4, parts=3, joints=2)


# ---- parts of molecules --------------------------------------------------------------


def test_each_letter_belongs_to_an_atom():
    """A branch's parentheses and a bond to the atom that follows, a digit to the one
    before."""
    text = "C(=O)Nc1cc[nH]c1Cl"
    assert owners(text) == [0, 1, 1, 1, 1, 2, 3, 3, 4, 5, 6, 6, 6, 6, 7, 7, 8, 8]


@pytest.mark.parametrize(
    ("text", "around", "ring"),
    [
        ("Cc1ccc(C(=O)N)cc1", "[MASK:1]c1ccc[MASK:8]cc1", "C[MASK:5](C(=O)N)[MASK:3]"),
        # What links two rings is part of the scaffold; of two systems the larger one.
        (
            "OC1CC1CNc1ccc2ccccc2c1",
            "[MASK:1]C1CC1CNc1ccc2ccccc2c1",
            "OC1CC1CN[MASK:14]",
        ),
        ("CCO", "[MASK:3]", "CCO"),
    ],
)
def test_letters_around_the_scaffold_and_of_a_ring_system(text, around, ring):
    letters = unknown_letters(text, unknown_around_scaffold(text))
    assert with_masks(text, letters) == around
    letters = unknown_letters(text, unknown_ring_system(text))
    assert with_masks(text, letters) == ring


def test_a_hole_is_in_the_middle():
    texts = ["C" * length for length in range(20, 50)]
    sizes = set()
    for text, (before, missing, after) in zip(texts, holes_of(texts), strict=True):
        assert before + missing + after == text
        assert 0 <= len(after) - len(before) <= 1
        sizes.add(len(missing))
    assert sizes == set(range(3, 9))


def test_a_filling_that_is_the_molecule_may_be_written_in_another_way():
    row = shares(["OCC", "CCN", "C("], ["CCO", "CCO", "CCO"])
    assert row == {"molecules": 3, "valid": 2 / 3, "equal": 1 / 3}


# ---- a GPT's fillings ----------------------------------------------------------------


class StubGPT:
    """Draws CCC, NNN and an end in turn, and expects N after N."""

    tokenizer = SimpleNamespace(eot=9, decode=lambda ids: "".join("CN"[n] for n in ids))

    def generate(self, prompts, new_tokens, num_samples, **options):
        drawn = [[0] * new_tokens, [1] * new_tokens, [9] * new_tokens]
        samples = []
        for prompt in prompts:
            given = [0] * len(prompt)
            for number in range(num_samples):
                samples.append(SimpleNamespace(tokens=given + drawn[number % 3]))
        return samples

    def score(self, texts, end):
        assert end
        rows = []
        for text in texts:
            likely = 0.0 if "NN" in text else -1000.0
            # The known left side has no part in the weights.
            log_probs = [-50.0] * (len(text) - 1) + [likely, -1.0]
            rows.append(SimpleNamespace(log_probs=log_probs))
        return rows


def test_a_gpt_resamples_by_what_follows_the_hole():
    holes = [("CC", "OOO", "C"), ("C", "OOOO", "CC")]
    assert filled_by_gpt(StubGPT(), holes, proposals=3) == ["NNN", "NNNN"]
    assert filled_by_gpt(StubGPT(), holes, proposals=1) == ["CCC", "CCCC"]
    StubGPT.generate = lambda *arguments, **options: [
        SimpleNamespace(tokens=[0, 0, 9, 9, 9])
    ]
    assert filled_by_gpt(StubGPT(), holes[:1], proposals=1) == [""]


# ---- the measures of a run -----------------------------------------------------------


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A small wheel, and its molecules prepared."""
    folder = tmp_path_factory.mktemp("molecules")
    chosen = [f"{'C' * n}O" for n in range(1, 41)]
    of_texts = statistics(TEXTS)
    moses = write_wheel(
        folder / "molsets.whl", chosen, TEXTS, TEXTS[:4], of_texts, of_texts
    )
    molecules.prepare(moses.wheel, out=folder / "data", validation=8)
    return moses, folder / "data"


def trained(material, tmp_path, monkeypatch, capsys, system="mask_query"):
    """Return the folder of a run of two steps."""
    config = tiny_config(
        material[1],
        tmp_path,
        "run",
        steps=2,
        model__vocab_size=32,
        model__block_size=molecules.BLOCK_SIZE,
        model__dropout=0.0,
        model__target="mask_query",
        model__position="both",
        order__kind="random",
        data__end="given",
    )
    if system == "gpt":
        config = change(config, data__end="predicted", order__kind="l2r")
        config = change(config, model__target="none")
    if system == "encoder":
        config = encoder_config(change(config, model__vocab_size=320))
        config = change(config, model__mask_token=27)
    run_main(train, monkeypatch, capsys, write_config(config))
    return config.run_folder


def measured(material, run, file, monkeypatch):
    """Return the measures of a run, by name. Samples are stubs."""
    moses, data = material

    def sampled(run, mode, count, is_gpt):
        row = {"nfe": 3, "seconds": 6.0}
        return [{"text": TEXTS[n % 5], **row} for n in range(count)]

    monkeypatch.setattr(molecule_measures, "sampled", sampled)
    molecules.measure(run, moses.wheel, data=data, sizes=SIZES, out=file)
    return {row["measure"]: row for row in read_lines(file)}


def test_a_run_is_measured_once(material, tmp_path, monkeypatch, capsys):
    run = trained(material, tmp_path, monkeypatch, capsys)
    file = tmp_path / "rows.jsonl"
    rows = measured(material, run, file, monkeypatch)
    expected = [
        f"nats_{s}_{o}" for s in ("test", "scaffolds") for o in ("l2r", "random")
    ]
    for part in ("hole", "scaffold", "ring"):
        expected += [f"{part}_{mode}" for mode in ("l2r", "random", "confidence")]
    expected += ["hole_nats", "joints"]
    for mode in ("l2r", "random", "confidence", "speculative"):
        expected.append(f"samples_{mode}_6")
    assert set(rows) == set(expected)

    # Left to right the likelihood is that of the API, with the length.
    measuring = Measuring(run, file, SIZES)
    whole = measuring.model.score(TEXTS[:4], end=True)
    mean = sum(one.nats for one in whole) / 4
    assert rows["nats_scaffolds_l2r"]["nats"] == pytest.approx(mean, rel=1e-3)
    assert len(rows["nats_test_random"]["each"]) == 4
    samples = rows["samples_random_6"]
    assert samples["valid"] == 1
    assert samples["seconds"] == 1
    assert samples["FCD test"] >= 0
    for row in rows["joints"]["rows"]:
        if row["size"] == 1:
            assert row["sum"] == pytest.approx(row["exact"], abs=1e-3)
            assert row["pseudo"] == pytest.approx(row["exact"], abs=1e-3)

    before = file.read_bytes()
    monkeypatch.setattr(Measuring, "add", lambda *values: 1 / 0)
    measured(material, run, file, monkeypatch)
    assert file.read_bytes() == before


@pytest.mark.parametrize("system", ["gpt", "encoder"])
def test_other_systems_have_the_measures_that_they_can(
    system, material, tmp_path, monkeypatch, capsys
):
    run = trained(material, tmp_path, monkeypatch, capsys, system)
    rows = measured(material, run, tmp_path / "rows.jsonl", monkeypatch)
    assert {row["system"] for row in rows.values()} == {system}
    if system == "gpt":
        names = "nats_test_l2r nats_scaffolds_l2r hole_resampled hole_one"
        assert set(rows) == {*names.split(), "samples_l2r_6"}
    else:
        assert "nats_test_l2r" not in rows
        assert rows["nats_test_random"]["draws"] == 8
        assert "samples_speculative_6" not in rows


@pytest.mark.slow(reason="starts a process for each mode")
def test_samples_are_those_of_sample_py(material, tmp_path, monkeypatch, capsys):
    run = trained(material, tmp_path, monkeypatch, capsys)
    measuring = Measuring(run, tmp_path / "rows.jsonl", SIZES)
    measure_samples(measuring, material[0], frozenset(), ["speculative"])
    (row,) = measuring.rows.values()
    assert row["samples"] == 6
    assert 0 < row["passes"] <= row["letters"]


# ---- the page ------------------------------------------------------------------------


def row_of(system, measure, values):
    run = f"out/molecules/quarter/{system}_muon_lr0.02_s300"
    row = {"key": f"{run} {measure}", "system": system, "run": run, "step": 6170}
    return {**row, "measure": measure, "parameters": 808_232, **values}


def nats_row(system, measure, mean):
    each = [mean + 0.5 * (-1) ** n for n in range(100)]
    return row_of(system, measure, {"nats": mean, "draws": 1, "each": each})


def sample_row(mode, samples, valid):
    values = {"mode": mode, "samples": samples, "valid": valid}
    values |= {"passes": 36.0, "seconds": 0.1, "examples": []}
    return row_of("mask_query", f"samples_{mode}_{samples}", values)


def hole_row(system, measure, valid):
    examples = [["C[MASK:3]C", "CCCCC", "CCOCC"], ["C[MASK]", "C(", "CC"]] * 3
    values = {"molecules": 1000, "valid": valid, "equal": 0.1, "examples": examples}
    return row_of(system, measure, values)


ROWS = [
    nats_row("mask_query", "nats_test_random", 26.0),
    nats_row("gpt", "nats_test_l2r", 25.0),
    sample_row("random", 3000, 0.30),
    sample_row("l2r", 3000, 0.31),
    hole_row("gpt", "hole_resampled", 0.6),
    hole_row("mask_query", "hole_l2r", 0.4),
    row_of(
        "mask_query",
        "joints",
        {
            "rows": [
                {"size": 1, "exact": e, "averaged": e, "sum": e, "pseudo": e}
                for e in (-1.0, -2.0)
            ]
        },
    ),
]


def test_the_page_says_what_is_not_run_and_has_no_pilots(tmp_path):
    out = tmp_path / "molecules.md"
    pilot = {**ROWS[0], "run": "/tmp/pilot_s300"}
    short = {**ROWS[0], "key": "short", "step": 440}
    file = write_rows(tmp_path / "rows.jsonl", [pilot, short])
    molecule_page.page(file, out, tmp_path / "molecules")
    text = out.read_text()
    assert text.count(": not run yet.") == 3
    assert "26.00" not in text
    assert "## How likely" not in text


def test_the_page_has_verdicts_tables_and_drawings(tmp_path):
    out = tmp_path / "molecules.md"
    folder = tmp_path / "molecules"
    folder.mkdir()
    molecule_page.page(write_rows(tmp_path / "rows.jsonl", ROWS), out, folder)
    text = out.read_text()
    assert "than a GPT from left to right: +1.00 ± 0.00 nats, **confirmed**." in text
    # 1.0 points are below the allowance for seeds.
    assert "in a random order: +1.0 ± 2.3 points, **undecided**." in text
    assert "by what follows: -20.0 ± 4.3 points, **opposite**." in text
    assert " 26.00 ± 0.10 |" in text
    assert "| CharRNN (published)" in text
    assert "808,232 |            9.20 |        0.02 |" in text
    assert "**Not run yet.** encoder, best of three losses; " in text
    assert (
        "![a hole of 3 to 8 letters in the middle, filled in](molecules/hole.svg)"
        in text
    )
    assert (folder / "hole.svg").read_text().count("<svg") >= 1
    assert (folder / "valid.png").read_bytes().startswith(b"\x89PNG")


def test_the_encoder_is_named_by_its_loss():
    rows = {"encoder": {"x": row_of("encoder_k", "x", {})}}
    titles = molecule_page.titles_of(rows)
    assert titles["encoder"] == "encoder, loss weighted by n / k"
    assert list(titles) == ["mask_query", "gpt", "encoder", "rotary", "adaln"]
    assert molecule_page.titles_of({})["encoder"] == "encoder, best of three losses"


def test_a_claim_is_of_the_most_samples():
    measures = {row["measure"]: row for row in (sample_row("l2r", 3000, 0.5),)}
    more = sample_row("l2r", 30_000, 0.6)
    measures[more["measure"]] = more
    row = molecule_page.most_samples(measures, "l2r")
    assert row["samples"] == 30_000
    assert molecule_page.most_samples(measures, "random") is None


def test_a_claim_without_a_figure_has_no_verdict():
    claim = Claim("x", "mask_query:valid_random", "gpt:valid_l2r")
    assert molecule_page.judged(claim, {}) is None
    _, claims = load_runs()
    same = [replace(claims[0], says=str(n)) for n in range(3)]
    lines = molecule_page.claim_lines(same, {})
    assert lines == [f"- *Claim {n + 1}*: {n}: not run yet." for n in range(3)]
