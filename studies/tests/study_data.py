"""What several tests of the studies use."""

from aogpt.runtime.errors import UserError
from studies.prepare import PrepareStudy, prepare_study


def prepared_study(name, out, *source, tokenizer="bytes", **options):
    """Prepare a dataset of the studies; returns its folder."""
    settings = PrepareStudy(
        name, out=out, source=source, tokenizer=tokenizer, **options
    )
    return prepare_study(settings)


def stopping_at_the_second(function):
    """Return a function that calls this one the first time and then fails, and the list
    of the calls so far."""
    calls = []

    def call(*arguments):
        if calls:
            raise UserError("stopped")
        calls.append(arguments)
        return function(*arguments)

    return call, calls
