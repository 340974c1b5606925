"""`lade compile`: `lade.warm_up` as a command, as for an image."""

from time import perf_counter

from lade.cli.loading import console
from lade.errors import LadeError
from lade.models.loading import LoadedModel


def run(loaded: LoadedModel | None) -> None:
    """Compile kernels, or load compiled ones, and print their folder.

    Raises:
        LadeError: it cannot be kept, so that every process would compile anew.
    """
    from lade.prewarming.warming import kernel_groups, warm_up
    from ngram_pool.compiling import cache_folder

    folder = cache_folder()
    if folder is None:
        raise LadeError(
            "compiled code cannot be kept: Numba finds no folder that it may write to; set the "
            "variable NUMBA_CACHE_DIR to one, here and where lade will run"
        )
    parts = {**kernel_groups()}
    if loaded is not None:
        model = loaded.model
        parts |= {f"what {type(model).__name__} takes": lambda: warm_up(model)}
    for what, compile_part in parts.items():
        start = perf_counter()
        with console.status(f"Compiling {what} …"):
            compile_part()
        console.print(f"[dim]{perf_counter() - start:6.1f} s for {what}[/dim]")
    print(f"compiled; kept in {folder}")
