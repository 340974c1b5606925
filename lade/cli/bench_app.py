"""`lade bench …`: commands, their options and help texts. Next file: `bench.py`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from lade.bench.prompts import Half
from lade.cli.options import (
    DRAFTING,
    SAMPLING,
    DeviceOption,
    DtypeOption,
    HalfOption,
    JsonOption,
    LimitOption,
    MarkdownOption,
    MaxDraftTokensOption,
    MaxNewTokensOption,
    ModelOption,
    PlotOption,
    PoolsOption,
    PromptsOption,
    SavePoolOption,
    TemperatureOption,
    ThreadsOption,
    TopPOption,
    TrustOption,
    VerificationOption,
    check_pools,
    load,
    make_config,
)

bench = typer.Typer(
    help="Measure speed and memory on this machine.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

# Panels of the list of commands.
_ANSWERS = "Answers to prompts"
_TRACES = "Recorded answers"
_PARTS = "Parts"
_FORMULA = "Formula of assisted generation"  # of the options of project
_POPULATION = "Who asks"  # of the options of fleet
_PAPER = "On paper"

SeedOption = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        help="Random seed of the first batch; each batch has the next, and all methods the same.",
        rich_help_panel=SAMPLING,
    ),
]
BatchSizeOption = Annotated[
    int,
    typer.Option(
        "--batch-size", metavar="N", min=1, help="Answer N prompts at once, in file order."
    ),
]
NumReturnSequencesOption = Annotated[
    int,
    typer.Option(
        "--num-return-sequences",
        metavar="N",
        min=1,
        help="Draw N answers to each prompt; needs a temperature.",
        rich_help_panel=SAMPLING,
    ),
]
SameDraftTokensOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="The same limit for every method: verify up to N draft tokens in every step. Without "
        "it, the measured time of steps decides, and prompt_lookup has its 10.",
        rich_help_panel=DRAFTING,
    ),
]

DraftSizesOption = Annotated[
    str,
    typer.Option(
        "--max-draft-tokens",
        metavar="N,…",
        help="Comma-separated: verify up to N draft tokens in every step.",
        rich_help_panel=DRAFTING,
    ),
]


@bench.command("run", rich_help_panel=_ANSWERS)
def bench_run(
    prompts: PromptsOption,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Comma-separated. Without it, plain (generate), prompt_lookup (transformers' own; "
            "one sequence at a time), lade (one pool for all prompts) and lade_fresh (an empty "
            "pool for each prompt or batch); with --pool, lade_pool and lade_pool_fresh, which are "
            "lade and lade_fresh with it. Also lade_tree, lade_rows, lade_chain and lade_snapshot, "
            "which are lade with that --verification, left out where the model cannot do it; "
            "first_layers and pool+first_layers, and with --assistant assistant, pool+assistant "
            "and hf_assistant (transformers' own), which draft by models; and others, which an "
            "unknown name lists.",
        ),
    ] = None,
    max_new_tokens: MaxNewTokensOption = 128,
    batch_size: BatchSizeOption = 1,
    limit: LimitOption = None,
    half: HalfOption = None,
    passes: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Repeat everything N times, with new pools unless --keep; show medians.",
        ),
    ] = 1,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Keep pools from pass to pass, so that the second knows the answers of the first; "
            "show each pass apart.",
        ),
    ] = False,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    num_return_sequences: NumReturnSequencesOption = 1,
    max_draft_tokens: SameDraftTokensOption = None,
    verification: VerificationOption = None,
    assistant: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Model for the methods with an assistant: an id or a folder, as for --model, or "
            "self for the model itself. ID:int8 and self:int8 take a copy with 8-bit weights.",
            rich_help_panel=DRAFTING,
        ),
    ] = None,
    first_layers: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Number of layers for the methods with first layers. Without it, they measure how "
            "many; hf_early_exit needs it.",
            rich_help_panel=DRAFTING,
        ),
    ] = None,
    pools: PoolsOption = None,
    save_pool: SavePoolOption = None,
    json: JsonOption = None,
    markdown: MarkdownOption = None,
    plot: PlotOption = None,
) -> None:
    """Compare ways of generating on a file of prompts, in turn, in one process.

    All get the same batches, options and seeds. The columns of the table:

    - tokens/s: tokens of all rows up to their EOS, over the time of the whole calls.
    - MAT: mean accepted tokens, those that a step adds to a row; plain decoding is 1.00.
    - same text: the share of answers with plain's tokens. prompt_lookup draws otherwise when it
      samples, so its texts differ then and are as likely.
    - accepted: the share of draft tokens that were accepted.
    - corrected: the share of steps with a draft that ended where the model chose another token
      than those drafted there.

    A second table has the times of drafting and of the model's forwards, and how many cores, and
    how much of a GPU, were busy; a third what each source of drafts did.
    """
    from lade.bench.prompts import PromptFile
    from lade.bench.settings import Settings
    from lade.cli.bench import ResultFiles, check_who_saves, choose_methods, run
    from lade.cli.bench_models import check_models, load_models

    settings = Settings(max_new_tokens, temperature, top_p, seed, batch_size, num_return_sequences)
    check_pools(pools, save_pool, verification)
    names, left_out = choose_methods(methods, settings, bool(pools))
    num_layers = check_models(names, assistant, first_layers)
    if save_pool is not None:
        check_who_saves(names, passes, keep)
    if keep and passes == 1:
        raise ValueError("expected --passes of 2 or more with --keep, got 1")
    if plot is not None and not {"plain"} < set(names):
        raise ValueError("expected plain and another of the methods to plot speed-ups")
    files = ResultFiles(json, markdown, plot)
    files.check()
    chosen = PromptFile.read(prompts, limit, half)
    loaded = load(model, device, dtype, threads, trust_remote_code)
    models = load_models(loaded, assistant, num_layers, trust_remote_code)
    config = make_config(max_draft_tokens, verification)
    run(
        loaded,
        chosen,
        names,
        left_out,
        settings,
        passes,
        keep,
        config,
        pools or [],
        save_pool,
        files,
        models,
        None if assistant is None else Path(assistant).name,
    )


@bench.command("show", rich_help_panel=_ANSWERS)
def bench_show(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILES", help="What bench run --json wrote.", exists=True, dir_okay=False
        ),
    ],
    markdown: MarkdownOption = None,
    plot: PlotOption = None,
) -> None:
    """Print result files of bench run as one table, also of different settings.

    A plot shows one file, by category, and is named like it.
    """
    from lade.cli.bench import ResultFiles, show

    wanted = ResultFiles(markdown=markdown, plot=plot)
    wanted.check()
    show(files, wanted)


@bench.command("arena", rich_help_panel=_ANSWERS)
def bench_arena(
    prompts: PromptsOption,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Comma-separated, as for bench run, but for those of transformers. Without it, "
            "lade, lade_untabled, lade_fresh, and the rivals without a window.",
        ),
    ] = None,
    max_draft_tokens: DraftSizesOption = "8,16,32",
    max_new_tokens: MaxNewTokensOption = 96,
    limit: LimitOption = None,
    half: HalfOption = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
    verification: VerificationOption = None,
    json: JsonOption = None,
    markdown: MarkdownOption = None,
    plot: PlotOption = None,
) -> None:
    """Compare drafters live, on the same texts and with equal numbers of draft tokens.

    generate answers each prompt greedily; then every method has to write that text, so that in
    half precision, too, all draft the same. Time does not count: the numbers depend on the
    machine only by the rounding of its arithmetic.
    """
    from lade.bench.prompts import PromptFile
    from lade.bench.settings import Settings
    from lade.cli.arena import choose_methods, run
    from lade.cli.bench import ResultFiles
    from lade.cli.replay import choose_draft_sizes

    names, draft_sizes = choose_methods(methods), choose_draft_sizes(max_draft_tokens)
    files = ResultFiles(json, markdown, plot)
    files.check()
    chosen = PromptFile.read(prompts, limit, half)
    loaded = load(model, device, dtype, threads, trust_remote_code)
    config = make_config(None, verification)
    run(loaded, chosen, names, draft_sizes, Settings(max_new_tokens), config, files)


@bench.command("grid", rich_help_panel=_ANSWERS)
def bench_grid(
    prompts: PromptsOption,
    dtypes: Annotated[
        str, typer.Option(metavar="NAMES", help="Comma-separated: number formats, as for --dtype.")
    ] = "float32,bfloat16",
    temperatures: Annotated[
        str, typer.Option(metavar="T,…", help="Comma-separated: temperatures; 0 is greedy.")
    ] = "0,0.7,1,1.5",
    lengths: Annotated[
        str, typer.Option(metavar="N,…", help="Comma-separated: the longest answers, in tokens.")
    ] = "32,96",
    batch_sizes: Annotated[
        str, typer.Option(metavar="N,…", help="Comma-separated: prompts to answer at once.")
    ] = "1,8",
    num_return_sequences: Annotated[
        int,
        typer.Option(
            "--num-return-sequences",
            metavar="N",
            min=1,
            help="Above temperature 0, also draw N answers to each prompt at once; 1 for not.",
        ),
    ] = 8,
    limit: LimitOption = None,
    half: HalfOption = None,
    passes: Annotated[
        int, typer.Option(metavar="N", min=1, help="Measure everything N times; show medians.")
    ] = 1,
    model: ModelOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
    max_draft_tokens: MaxDraftTokensOption = None,
    verification: VerificationOption = None,
    json: JsonOption = None,
    markdown: MarkdownOption = None,
) -> None:
    """Compare lade with generate in every setting: is it slower anywhere?

    Number formats, temperatures, lengths and batch sizes are combined. Every call has a new pool.
    """
    from lade.bench.grid import settings_of
    from lade.bench.prompts import PromptFile
    from lade.cli.bench import ResultFiles
    from lade.cli.grid import choose_dtypes, choose_numbers, choose_sizes, run

    grid = settings_of(
        choose_numbers("--temperatures", temperatures),
        choose_sizes("--lengths", lengths),
        choose_sizes("--batch-sizes", batch_sizes),
        num_return_sequences,
    )
    names = choose_dtypes(dtypes)
    files = ResultFiles(json, markdown)
    files.check()
    chosen = PromptFile.read(prompts, limit, half)
    loading = (model, device, threads, trust_remote_code)
    config = make_config(max_draft_tokens, verification)
    run(loading, names, chosen, grid, passes, config, files)


@bench.command("serve", rich_help_panel=_ANSWERS)
def bench_serve(
    servers: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=URL…",
            help="Servers that are running, as plain=http://localhost:8000; the others are "
            "compared with the first.",
        ),
    ],
    prompts: PromptsOption,
    max_new_tokens: MaxNewTokensOption = 128,
    limit: LimitOption = None,
    half: HalfOption = None,
    json: JsonOption = None,
    markdown: MarkdownOption = None,
) -> None:
    """Compare OpenAI-compatible servers: tokens a second, time to the first token.

    They are asked in turn, greedily, with all turns of each prompt and their own earlier answers.
    """
    from lade.bench.prompts import PromptFile
    from lade.cli.bench import ResultFiles
    from lade.cli.bench_serve import read_servers, run

    addresses = read_servers(servers)
    files = ResultFiles(json, markdown)
    files.check()
    run(addresses, PromptFile.read(prompts, limit, half), max_new_tokens, files)


@bench.command("engines", rich_help_panel=_ANSWERS)
def bench_engines(
    prompts: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE",
            help="Prompts, as for bench run. May be repeated.",
            exists=True,
            dir_okay=False,
        ),
    ],
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Comma-separated. Without it, plain (no speculation), ngram (vLLM's own, of 1 to "
            "4 tokens), suffix (vLLM's, where arctic-inference is installed), pool (lade's, one "
            "for all requests), pool_private (lade's, one for each) and, with --prewarmed, "
            "pool_prewarmed. Also others, which an unknown name lists.",
        ),
    ] = None,
    concurrency: Annotated[
        str, typer.Option(metavar="N,…", help="Comma-separated: requests at once.")
    ] = "1,4,16,64",
    passes: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Answer all prompts N times at each number of requests; drafters live on.",
        ),
    ] = 2,
    max_new_tokens: MaxNewTokensOption = 64,
    num_speculative_tokens: Annotated[
        int,
        typer.Option(
            "--num-speculative-tokens",
            metavar="N",
            min=1,
            help="Draft up to N tokens for a request in a step, with every method.",
            rich_help_panel=DRAFTING,
        ),
    ] = 8,
    options: Annotated[
        str,
        typer.Option(
            metavar="JSON",
            help="Options of lade's proposer, as a JSON object.",
            rich_help_panel=DRAFTING,
        ),
    ] = "{}",
    prewarmed: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The table that lade prewarm made for the model, for pool_prewarmed.",
            exists=True,
            dir_okay=False,
            rich_help_panel=DRAFTING,
        ),
    ] = None,
    limit: LimitOption = None,
    half: HalfOption = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Run in float32, also draw answers at temperature 1, and fail unless every "
            "method's greedy answers have plain's tokens and its draws plain's distribution.",
        ),
    ] = False,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
    seed: SeedOption = 0,
    json: JsonOption = None,
    markdown: MarkdownOption = None,
) -> None:
    """Compare methods of speculative decoding in vLLM, with many requests at once.

    Each method has an engine of its own, which is sent the next prompt as soon as an answer is
    complete. With every number of requests, drafters begin anew; what they learn in the first pass
    they know in the second. The cache of prefixes is emptied between passes.

    Needs vLLM in the environment of this command.
    """
    import os

    from lade.bench.engines.methods import PLAIN, check_engine
    from lade.bench.engines.methods import choose_methods as choose_engine_methods
    from lade.bench.prompts import PromptFile
    from lade.cli.bench import ResultFiles
    from lade.cli.bench_engines import (
        choose_concurrency,
        choose_dtype,
        choose_options,
        make_plan,
        run,
    )

    check_engine()
    names, left_out = choose_engine_methods(methods, prewarmed is not None)
    if check and not {PLAIN} < {*names}:
        raise ValueError("expected plain and another of the methods with --check")
    sizes, chosen_dtype = choose_concurrency(concurrency), choose_dtype(dtype, check)
    chosen_options = choose_options(options)
    files = ResultFiles(json, markdown)
    files.check()
    chosen = [PromptFile.read(path, limit, half) for path in prompts]
    plan = make_plan(
        model,
        chosen,
        trust_remote_code,
        check,
        dtype=chosen_dtype,
        concurrency=sizes,
        num_passes=passes,
        max_new_tokens=max_new_tokens,
        num_speculative_tokens=num_speculative_tokens,
        seed=seed,
        options=chosen_options,
        table=None if prewarmed is None else str(prewarmed.resolve()),
    )
    run(plan, chosen, names, left_out, threads or os.cpu_count() or 1, files)


@bench.command("turns", rich_help_panel=_ANSWERS)
def bench_turns(
    dtypes: Annotated[
        str, typer.Option(metavar="NAMES", help="Comma-separated: number formats, as for --dtype.")
    ] = "float32,bfloat16",
    turns: Annotated[
        int, typer.Option("--turns", metavar="N", min=2, help="Turns of each chat.")
    ] = 10,
    history_tokens: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Tokens of the chat before its last question."),
    ] = 4000,
    max_new_tokens: MaxNewTokensOption = 24,
    passes: Annotated[
        int, typer.Option(metavar="N", min=1, help="Hold N chats; show medians.")
    ] = 3,
    model: ModelOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
    max_draft_tokens: MaxDraftTokensOption = None,
    verification: VerificationOption = None,
    json: JsonOption = None,
    markdown: MarkdownOption = None,
) -> None:
    """Measure how long each turn of a growing chat waits for its first token.

    Plain generate runs the whole conversation at every turn; lade, whose Config(reuses_prefix=True)
    keeps it, what is new.
    """
    from lade.cli.bench import ResultFiles
    from lade.cli.grid import choose_dtypes
    from lade.cli.turns import run

    files = ResultFiles(json, markdown)
    files.check()
    loading = (model, device, threads, trust_remote_code)
    config = replace(make_config(max_draft_tokens, verification), reuses_prefix=True)
    names = choose_dtypes(dtypes)
    run(loading, names, turns, history_tokens, max_new_tokens, passes, config, files)


@bench.command("memory", rich_help_panel=_ANSWERS)
def bench_memory(
    prompts: PromptsOption,
    methods: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Comma-separated, as for bench run; the others are compared with plain.",
        ),
    ] = "plain,lade",
    max_new_tokens: MaxNewTokensOption = 128,
    batch_size: BatchSizeOption = 1,
    limit: LimitOption = None,
    repeats: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Measure each method in N processes; show medians."),
    ] = 1,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    num_return_sequences: NumReturnSequencesOption = 1,
    max_draft_tokens: MaxDraftTokensOption = None,
    json: JsonOption = None,
) -> None:
    """Compare the peak memory of ways of generating, each in a fresh process.

    On a CPU, that is the most that the whole process has resident while it answers the prompts:
    weights, libraries and all. On a GPU, it is the most that torch has allocated there. The table
    also shows how much of it came on top of the loaded and warmed-up model.
    """
    from lade.bench.settings import Settings
    from lade.cli.bench import choose_methods
    from lade.cli.memory import run

    settings = Settings(max_new_tokens, temperature, top_p, seed, batch_size, num_return_sequences)
    names, _ = choose_methods(methods, settings)
    dtype_name = dtype.value if dtype else None
    loading = (model, device, dtype_name, threads, trust_remote_code)
    run(*loading, prompts, names, settings, limit, repeats, max_draft_tokens, json)


@bench.command("record", rich_help_panel=_TRACES)
def bench_record(
    prompts: PromptsOption,
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Write the traces here, as safetensors.", dir_okay=False),
    ],
    max_new_tokens: MaxNewTokensOption = 256,
    limit: LimitOption = None,
    half: HalfOption = None,
    num_successors: Annotated[
        int,
        typer.Option(
            "--num-successors",
            metavar="N",
            min=1,
            help="Keep the model's N likeliest next tokens at every position.",
        ),
    ] = 16,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
) -> None:
    """Answer prompts with lade, and record what bench replay needs.

    That is the tokens of prompts and answers, and the tokens that the model finds likeliest after
    each of them, from one more forward over the whole text.
    """
    from lade.bench.prompts import PromptFile
    from lade.bench.settings import Settings
    from lade.cli.bench import check_writable
    from lade.cli.replay import record

    settings = Settings(max_new_tokens, temperature, top_p, seed)
    check_writable(out)
    chosen = PromptFile.read(prompts, limit, half)
    loaded = load(model, device, dtype, threads, trust_remote_code)
    record(loaded, chosen, out, settings, num_successors)


@bench.command("replay", rich_help_panel=_TRACES)
def bench_replay(
    traces: Annotated[
        Path,
        typer.Argument(
            metavar="TRACES", help="What bench record wrote.", exists=True, dir_okay=False
        ),
    ],
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Comma-separated, as for bench run. Without it, all that draft without a model.",
        ),
    ] = None,
    max_draft_tokens: DraftSizesOption = "8,16,32,64",
    passes: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Replay everything N times, keeping the pools; show each pass apart.",
        ),
    ] = 1,
    table: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The file that lade prewarm made for the recorded model; methods lade and "
            "lade_fresh use it, lade_untabled does not.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    json: JsonOption = None,
    markdown: MarkdownOption = None,
    plot: PlotOption = None,
) -> None:
    """Try drafters on recorded answers, without a model and much faster than with one.

    Every step verifies as many draft tokens as it may, so steps and accepted tokens are those of
    bench run with the same --max-draft-tokens and exact arithmetic.

    Not so for methods that learn from the model's logits: what it finds likely after a rejected
    token was not recorded, so they learn less here than live, and their numbers are too low.
    """
    from lade.cli.bench import ResultFiles
    from lade.cli.replay import choose_draft_sizes, choose_methods, replay

    names, draft_sizes = choose_methods(methods), choose_draft_sizes(max_draft_tokens)
    files = ResultFiles(json, markdown, plot)
    files.check()
    replay(traces, names, draft_sizes, passes, table, files)


@bench.command("fleet", rich_help_panel=_TRACES)
def bench_fleet(
    traces: Annotated[
        Path,
        typer.Argument(
            metavar="TRACES", help="What bench record wrote.", exists=True, dir_okay=False
        ),
    ],
    replicas: Annotated[
        str, typer.Option(metavar="N,…", help="Comma-separated: replicas of the fleets.")
    ] = "1,10,100,1000",
    exchange_sec: Annotated[
        str,
        typer.Option(
            metavar="T,…",
            help="Comma-separated: replicas send what they learned, and fetch what others did, "
            "every T seconds. An empty text for no exchanges.",
        ),
    ] = "60,10,1",
    shards: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Comma-separated: pools that requests are sent to. tenant, topic (a tenant's "
            "prompts of one category), user, and layered: the tenant's, with one pool of the whole "
            "fleet as a layer. An empty text for none.",
        ),
    ] = "tenant,topic,user,layered",
    harvest: Annotated[
        bool, typer.Option(help="Also send what was harvested, which takes more room than text.")
    ] = True,
    max_draft_tokens: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Verify up to N draft tokens in every step.",
            rich_help_panel=DRAFTING,
        ),
    ] = 8,
    capacity_tokens: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Tokens of each pool.", rich_help_panel=DRAFTING),
    ] = 2**18,
    requests: Annotated[
        int,
        typer.Option(
            "--requests", metavar="N", min=1, help="Measure N requests, the last to some replicas."
        ),
    ] = 48,
    requests_per_sec: Annotated[
        float,
        typer.Option(
            metavar="X", help="Requests a second to each replica.", rich_help_panel=_POPULATION
        ),
    ] = 1.0,
    seconds: Annotated[
        float,
        typer.Option(metavar="S", help="Seconds of requests.", rich_help_panel=_POPULATION),
    ] = 300.0,
    tenants_per_replica: Annotated[
        float,
        typer.Option(
            metavar="X", help="Tenants; a larger fleet has more.", rich_help_panel=_POPULATION
        ),
    ] = 4.0,
    users_per_tenant: Annotated[
        int, typer.Option(metavar="N", min=1, help="Users.", rich_help_panel=_POPULATION)
    ] = 10,
    skew: Annotated[
        float,
        typer.Option(
            metavar="S",
            help="The n-th tenant, and the n-th question of one, comes 1 / n^S as often as the "
            "first.",
            rich_help_panel=_POPULATION,
        ),
    ] = 0.8,
    seed: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Random seed.", rich_help_panel=_POPULATION),
    ] = 0,
    users: Annotated[
        int, typer.Option(metavar="N", min=1, help="Users on paper.", rich_help_panel=_PAPER)
    ] = 10**6,
    requests_per_day: Annotated[
        float, typer.Option(metavar="X", help="Requests of each.", rich_help_panel=_PAPER)
    ] = 10.0,
    json: JsonOption = None,
    markdown: MarkdownOption = None,
    plot: PlotOption = None,
) -> None:
    """Simulate a fleet of replicas: what sharing their pools is worth, and what it costs.

    Recorded questions are asked by tenants, each in words of its own: of the recording, only the
    tokens that two categories of prompts have in common are the same for all. Some questions are
    asked more often than others, and some again; these are shown apart (MAT repeated).

    The rows of a fleet are a pool per replica and nothing shared; the same, exchanged every T
    seconds; one pool of all text at once; and pools that requests are sent to. The exchanged bytes
    are real. A second table is arithmetic on what a request cost.
    """
    from lade.bench.fleet import Setup
    from lade.bench.traffic import Population
    from lade.cli.bench import ResultFiles
    from lade.cli.fleet import choose_sharings, run
    from lade.cli.grid import choose_sizes

    fleets = choose_sizes("--replicas", replicas)
    sharings = choose_sharings(exchange_sec, shards)
    population = Population(
        requests_per_sec, seconds, tenants_per_replica, users_per_tenant, skew, seed
    )
    setup = Setup(max_draft_tokens, capacity_tokens, requests, harvest)
    files = ResultFiles(json, markdown, plot)
    files.check()
    run(traces, fleets, sharings, population, setup, users, requests_per_day, files)


@bench.command("fit", rich_help_panel=_PARTS)
def bench_fit(
    prompts: PromptsOption,
    max_new_tokens: MaxNewTokensOption = 128,
    limit: LimitOption = None,
    half: HalfOption = Half.fit,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
    max_draft_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Verify N draft tokens a step.", rich_help_panel=DRAFTING
        ),
    ] = 16,
    json: JsonOption = None,
) -> None:
    """Fit the weights that new pools begin with, and print them as in ngram_pool/weights.py.

    Prompts are answered once, greedily. Pools then learn from these answers in several passes,
    beginning with weights that nothing was fitted to.
    """
    from lade.bench.prompts import PromptFile
    from lade.bench.settings import Settings
    from lade.cli.bench import check_writable
    from lade.cli.fit import run

    check_writable(json)
    chosen = PromptFile.read(prompts, limit, half)
    loaded = load(model, device, dtype, threads, trust_remote_code)
    run(loaded, chosen, Settings(max_new_tokens), make_config(max_draft_tokens, None), json)


@bench.command("project", rich_help_panel=_TRACES)
def bench_project(
    step_cost: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Seconds of one forward by its number of tokens: CSV lines like 8,0.023, or a "
            "JSON object. Sizes between are interpolated, none beyond.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    mat: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Project what bench replay --json wrote; may be repeated.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    cost_ratio: Annotated[
        float | None,
        typer.Option(
            metavar="C",
            min=0.0,
            help="Cost of a draft forward, one of the model being 1.",
            rich_help_panel=_FORMULA,
        ),
    ] = None,
    acceptance: Annotated[
        str,
        typer.Option(
            metavar="A,…",
            help="Comma-separated: probabilities that a draft token is accepted.",
            rich_help_panel=_FORMULA,
        ),
    ] = "0.5,0.6,0.7,0.8,0.9",
    k: Annotated[
        str,
        typer.Option(
            "--k",
            metavar="K,…",
            help="Comma-separated: draft tokens of a step.",
            rich_help_panel=_FORMULA,
        ),
    ] = "1,2,3,4,5,6,8,10,12,16",
    measured: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Compare with what bench run --json wrote; may be repeated.",
            exists=True,
            dir_okay=False,
            rich_help_panel=_FORMULA,
        ),
    ] = None,
    json: JsonOption = None,
    markdown: MarkdownOption = None,
) -> None:
    """Project replays to another machine, or a draft model's speed-up by the formula.

    With --mat and --step-cost, the speed-up is MAT x cost of 1 token / cost of 1 + N tokens, where
    N is the limit of draft tokens; the best N of each method is marked. Prefill and the time to
    draft are left out, and every step counts as if its draft had N tokens.

    With --cost-ratio C, it is that of a draft model that runs K times a step, where each draft
    token is accepted with probability A if those before it were: (1 - A^(K+1)) / (1 - A) tokens a
    step, over a cost of K x C + 1. The table has a row for each K, and marks the best of each A.
    With --step-cost, what it costs to verify K + 1 tokens takes the place of the 1.

    With --measured, the formula is held against real runs, by their K, acceptance and costs.
    """
    from lade.cli.bench import ResultFiles
    from lade.cli.project import project_by_formula, project_replays

    files = ResultFiles(json, markdown)
    files.check()
    if mat:
        if step_cost is None or cost_ratio is not None or measured:
            raise ValueError(
                "expected --mat with --step-cost, and without --cost-ratio and --measured"
            )
        project_replays(step_cost, mat, files)
    else:
        project_by_formula(cost_ratio, acceptance, k, step_cost, measured or [], files)


@bench.command("gpu", rich_help_panel=_PARTS)
def bench_gpu(
    shapes: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Comma-separated: 1b and 8b, of the sizes of Llama-3.2-1B and Llama-3.1-8B, and "
            "tiny, to try the command out.",
        ),
    ] = "8b,1b",
    stages: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Comma-separated, of those above. Without it, all, in that order.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="cuda, cuda:1, …, or cpu with --shapes tiny. Without it, cuda."
        ),
    ] = None,
    minutes: Annotated[
        float,
        typer.Option(
            metavar="T",
            min=0.0,
            help="End after T minutes, a quarter of one late at most, and list what was not run. "
            "Every stage has its share; what it leaves of it is for the stages after it.",
        ),
    ] = 7.5,
    mat: Annotated[
        float,
        typer.Option(
            metavar="X", min=1.0, help="Accept X tokens a step on average, bonus included."
        ),
    ] = 2.5,
    max_draft_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Verify N draft tokens in every step of whole answers."
        ),
    ] = 31,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Accept as many tokens as drafts in these traces of bench record, replayed, with "
            "frequencies changed to the MAT asked for. Without it, as in answers to the demo's "
            "prompts.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Measure steps on a GPU against its memory bandwidth, and whole answers against generate.

    The models have random weights, so nothing is downloaded (except for the default model, where it
    can be had), and drafts are accepted as in recorded decoding. Each stage runs in a process of
    its own: one that crashes or hangs is reported, and the others go on. In turn:

    - bandwidth: the copy bandwidth of the device;
    - host: how long the host keeps the device waiting between two forwards;
    - plain: tokens per second of generate;
    - steps: the time of a step by tree size and context; what share of that bandwidth reading
      weights, keys and values once makes of it; how much of it the host needs to launch it;
    - graphs: tokens per second of lade, its steps recorded as CUDA graphs, and their memory;
    - static: the same of generate with a static cache, which transformers compiles;
    - eager: lade as it is by default, without fixed shapes;
    - sampled: generate and lade, sampling;
    - chat: ten turns of a growing chat, and how many steps each had to record;
    - batches: generate and lade, four and eight prompts at once;
    - kernels: what the device does in a step, kernel by kernel, and the gaps between;
    - real: a small real model, greedy and sampled;
    - compiled: lade on the compiled model;
    - vllm: vLLM with its n-gram drafts, if it is installed.
    """
    from lade.cli.bench_gpu import run

    run(shapes, stages, device, minutes, mat, max_draft_tokens + 1, trace, json)


@bench.command("pool", rich_help_panel=_PARTS)
def bench_pool(
    max_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", min=10_000, help="The largest pool to fill; from 10^4 up, by tens."
        ),
    ] = 10**7,
    max_draft_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Draft up to N tokens.")
    ] = 32,
    json: JsonOption = None,
) -> None:
    """Time the n-gram pool alone, observing tokens and drafting, as it fills."""
    from lade.cli.bench import run_pool

    run_pool(max_tokens, max_draft_tokens, json)


@bench.command("pool-threads", rich_help_panel=_PARTS)
def bench_pool_threads(
    max_threads: Annotated[
        int, typer.Option(metavar="N", min=1, help="The most threads; from 1 up, by fours.")
    ] = 64,
    max_draft_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Draft up to N tokens.")
    ] = 32,
    json: JsonOption = None,
) -> None:
    """Time one n-gram pool that threads share: calls a second, and how long each waits."""
    from lade.cli.bench import run_pool_threads

    run_pool_threads(max_threads, max_draft_tokens, json)


@bench.command("pool-requests", rich_help_panel=_PARTS)
def bench_pool_requests(
    max_requests: Annotated[
        int, typer.Option(metavar="N", min=1, help="The most requests; from 1 up, by fours.")
    ] = 256,
    max_draft_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Draft up to N tokens for each.")
    ] = 8,
    json: JsonOption = None,
) -> None:
    """Time what a serving engine's proposer takes in a step, by the number of requests."""
    from lade.cli.bench import run_pool_requests

    run_pool_requests(max_requests, max_draft_tokens, json)
