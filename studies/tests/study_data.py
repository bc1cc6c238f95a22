"""Data sets of the studies, prepared in the process of a test."""

from studies.prepare import PrepareStudy, prepare_study


def prepared_study(name, out, *source, tokenizer="bytes", **options):
    """Prepare a dataset of the studies; returns its folder."""
    settings = PrepareStudy(
        name, out=out, source=source, tokenizer=tokenizer, **options
    )
    return prepare_study(settings)
