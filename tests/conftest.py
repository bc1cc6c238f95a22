"""Shared by all tests: one way to run a script, small runs, and the folder of real text."""

import gc
import os
import signal
from collections import Counter
from pathlib import Path

import hypothesis
import pytest
import torch
from helpers import ALONE, encoder_config, make_data, tiny_config

import train
from aogpt.orders import OrderConfig
from aogpt.runtime.command_line import run_script as run_main

# Tiny tensors: one thread is faster, and the processes that tests start share two cores.
torch.set_num_threads(1)
# Without a GPU Triton's kernels run in its interpreter; Triton reads this when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# no test may depend on how busy the machine is
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

SLOW = (
    "test_train",
    "test_elastic",
    "test_parallel",
    "test_end_to_end",
    "test_sharded",
    "test_memory_plan",
    "test_eval_ppl",
)


# Of these, whose many cases take a third of the time of all tests, make test takes every seventh
# case (parameters seldom have seven values, so that all of them get their turn); make test-all
# takes all.
THINNED = (
    "test_samples_match_enumeration",
    "test_infilling_matches_enumeration",
    "test_rows_of_different_lengths_follow_the_distribution_of_their_own_length",
    "test_generated_log_probs_are_those_of_the_uncached_model",
    "test_a_sample_depends_on_its_own_row_and_not_on_the_batch",
    "test_model_calls_and_token_forwards_of_fixed_plans",
    "test_a_decoder_computes_its_formulas",
    "test_tokens_are_drawn_from_the_truncated_distribution",
    "test_the_kernel_draws_what_the_reference_draws",
    "test_ragged_attention_is_masked_attention",
    "test_the_engine_generates_with_kernels_what_it_does_without",
    "test_replayed_steps_are_eager_steps",
    "test_any_order_estimates_are_unbiased_given_the_context",
    "test_masks_of_stratified_rates_have_their_distribution_in_every_row",
    "test_the_training_forward_of_every_system_compiles_to_one_graph_once",
    "test_the_peak_of_a_step_is_the_plans_within_a_factor",
    "test_prepared_splits_hold_the_records_of_their_keys",
    "test_a_debug_config_trains_resumes_evaluates_and_samples",
    "test_an_infill_keeps_its_text_and_fills_every_mask_with_so_many_tokens",
    "test_a_prompt_is_kept_and_only_the_rest_is_generated",
    "test_a_script_ends_in_one_line_and_shows_everything",
    "test_a_file_of_sample_py_and_samples_of_the_same_seed_get_the_same_scores",
    "test_the_nucleus_found_by_bisection_is_the_sorted_one",
    "test_both_paths_draw_the_same_tokens_from_the_same_uniforms",
    "test_parts_of_several_processes_are_what_loading_and_converting_take",
    "test_no_flipped_byte_of_a_file_of_weights_goes_unnoticed_unless_it_changes_nothing",
)


@pytest.hookimpl(tryfirst=True)  # before those that are marked are left out
def pytest_collection_modifyitems(items):
    """Mark most cases of THINNED as slow. And two workers take file after file: the slow ones
    first, so that neither is left alone with one at the end."""
    cases = Counter()
    for item in items:
        name = item.originalname
        if name in THINNED:
            if cases[name] % 7:
                item.add_marker("slow")
            cases[name] += 1
    places = {name: place for place, name in enumerate(SLOW)}
    # A stable sort: the order within files stays.
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish():
    """Collections of garbage, which some tests and out-of-memory errors ask for, need not look at
    all that was imported: 0.2 s each."""
    gc.freeze()


@pytest.fixture(scope="session")
def real_data():
    """The folder of real text that AOGPT_DATA names; tests that need it are skipped without it."""
    folder = os.environ.get("AOGPT_DATA")
    if not folder:
        pytest.skip("AOGPT_DATA is not set: no real text at hand")
    return Path(folder)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def run(data, tmp_path_factory):
    """A run folder whose averaged and last weights differ."""
    config = tiny_config(data, tmp_path_factory.mktemp("out"), checkpoint__interval=20)
    train.train(config, ALONE)
    return config.run_folder


@pytest.fixture(scope="session")
def plain(run, data):
    """A run of a model that is not conditioned on its target position."""
    config = tiny_config(
        data,
        run.parent,
        "plain",
        steps=6,
        order=OrderConfig("l2r"),
        model__target="none",
    )
    train.train(config, ALONE)
    return config.run_folder


@pytest.fixture(scope="session")
def encoder(run, data):
    """A run of a model with full attention."""
    config = encoder_config(tiny_config(data, run.parent, "encoder", steps=6))
    train.train(config, ALONE)
    return config.run_folder


@pytest.fixture
def script(monkeypatch, capsys):
    """Run a script's main with these arguments, as its last lines do, in this process: (exit
    status, stdout, stderr). An exception that it would show as a traceback fails the test."""

    def call(module, *arguments):
        monkeypatch.setattr("sys.argv", [f"{module.__name__}.py", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            run_main(module.main)
        return stop.value.code or 0, *capsys.readouterr()

    return call


@pytest.fixture(autouse=True)
def signal_handlers():
    """train() takes over SIGTERM and SIGINT: give them back to pytest."""
    before = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
