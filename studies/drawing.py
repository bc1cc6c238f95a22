"""Figures of matplotlib, in one style."""

import io

# Okabe and Ito's colors, which the color-blind can tell apart.
COLORS = "#0072B2 #000000 #D55E00 #009E73 #E69F00 #CC79A7 #56B4E9 #8C8C00".split()


def new_figure(
    rows: int = 1, columns: int = 1, size: tuple[float, float] = (7, 4.5), **options
):
    """Return a matplotlib figure that needs no screen, and its axes. size: in
    inches."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["axes.prop_cycle"] = plt.cycler(color=COLORS)
    return plt.subplots(rows, columns, figsize=size, layout="constrained", **options)


def png(figure, dpi: int = 150) -> bytes:
    """Return a matplotlib figure as a PNG; closes it."""
    import matplotlib.pyplot as plt

    image = io.BytesIO()
    figure.savefig(image, dpi=dpi, format="png")
    plt.close(figure)
    return image.getvalue()
