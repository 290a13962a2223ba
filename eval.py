"""Look at runs: loss, a sample, downstream tasks, weights for other programs, tables and plots.

    python eval.py loss RUN                   # token-averaged loss, bits per byte
    python eval.py sample RUN --prompt TEXT
    python eval.py export RUN DIR             # a Hugging Face folder with its tokenizer
    python eval.py tasks RUN --tasks ifeval,mmlu_pro,bbh,humaneval_plus --allow-code
    python eval.py report RUN ... --out DIR   # of runs that are finished, and of others so far

RUN is a run folder; its latest whole checkpoint is read. Draws from its own generator.
"""

import argparse
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import pandas
import tiktoken
import torch
from matplotlib.figure import Figure

import autoloco
import data
import diloco
import model
import train

HARNESS = "lm_eval[hf,ifeval]==0.4.13"  # EleutherAI's harness: optional, for `tasks` only


def open_run(path: Path) -> tuple[train.Config, model.Transformer]:
    """Configuration of a run, and its synchronised model in fp32 on the best device."""
    config = train.load_config(path)
    network = model.Transformer(train.run_shape(path))
    network.load_state_dict(dict(train.load_weights(path)))
    return config, network.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def loss(run: Path) -> dict[str, float]:
    """Validation loss of a run's checkpoint (E.1), as training measures it at its end.

    `val_loss` in nats a token (after fine-tuning, an assistant token), `bits_per_byte`,
    `val_tokens`.
    """
    config, network = open_run(run)
    ranks = diloco.Ranks(0, 1, config.workers, device=network.embedding.device)
    revision = train.read_facts(run)["data"].get("revision", "")  # of a dataset on the hub
    return train.validate(network, data.open_source(config, revision), ranks, config.dtype)


@torch.no_grad()
def sample(
    run: Path, prompt: str = "", tokens: int = 200, temperature: float = 0.8, seed: int = 0
) -> str:
    """A prompt and the run's continuation, after fine-tuning its answer.

    Temperature 0 takes the likeliest token. It ends with the text (in chat, with the turn), after
    `tokens` new ones, or at the length that the run was trained on.
    """
    if not 0 <= temperature < math.inf or tokens < 1:
        raise ValueError("--temperature: not below 0, --tokens: at least 1")
    config, network = open_run(run)
    tokenizer = data.open_tokenizer(config.tokenizer, data.tokenizer_folders(config))
    ids, ends = [tokenizer.begin, *map(int, tokenizer.encode(prompt))], {tokenizer.end}
    chat = train.read_facts(run)["data"]["chat"]
    if chat:
        turns = (("user", prompt), ("assistant", ""))
        ids = data.encode_chat(tokenizer, turns, sys.maxsize)[0].tolist()
        ends.add(ids.pop())  # the answer's turn stays open
    room = config.seq_len - len(ids)
    if room < 1:
        raise ValueError(f"--prompt: {len(ids)} tokens, and {run} has read {config.seq_len}")
    generator = torch.Generator(network.embedding.device).manual_seed(seed)
    new: list[int] = []
    while len(new) < min(tokens, room) and ends.isdisjoint(new):
        read = torch.tensor([ids + new], device=generator.device)
        scores = network.logits(read, last=True)[0, 0, : tokenizer.vocab_size]  # not the padding
        weights = (scores / temperature).softmax(-1) if temperature else scores == scores.max()
        new.append(int(torch.multinomial(weights.float(), 1, generator=generator)))
    return prompt + "\n\n" * chat + tokenizer.decode([token for token in new if token not in ends])


# ---------------------------------------------------------------- weights for other programs


def export(run: Path, folder: Path) -> None:
    """Writes weights, tokenizer and generation settings for transformers' `Auto` classes.

    The tokenizer gives the ids that training read, the token that begins a text included. Names of
    special tokens are text to it, as in training; only after fine-tuning it parses them, since a
    chat template spells them (`split_special_tokens=True` makes them text again).
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder}: is not empty")
    config, chat = train.load_config(run), train.read_facts(run)["data"]["chat"]
    tokenizer = data.open_tokenizer(config.tokenizer, data.tokenizer_folders(config))
    weights = dict(train.load_weights(run))
    save_tokenizer(tokenizer, folder, chat)
    ends = [tokenizer.end, *[tokenizer.turn_end] * chat]
    model.save_hf(folder, train.run_shape(run), weights, tokenizer.begin, ends)
    settings = {"bos_token_id": tokenizer.begin, "eos_token_id": ends}
    train.write_json(folder / "generation_config.json", settings | {"pad_token_id": tokenizer.end})


def save_tokenizer(tokenizer: data.Tokenizer, folder: Path, chat: bool) -> None:
    """Writes tokenizer.json and tokenizer_config.json.

    tiktoken's byte pairs become a tokenizer by transformers' own converter.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    begin, end = (tokenizer.decode([token]) for token in (tokenizer.begin, tokenizer.end))
    options = {"bos_token": begin, "eos_token": end, "pad_token": end}
    if chat:
        options["eos_token"] = tokenizer.decode([tokenizer.turn_end or 0])
        options["chat_template"] = data.CHAT_TEMPLATE
    fast = encoding = tokenizer.encoding
    if isinstance(encoding, tiktoken.Encoding):
        special = sorted(encoding.special_tokens_set, key=encoding.encode_single_token)
        converter: Any = TikTokenConverter(pattern=encoding._pat_str, extra_special_tokens=special)
        # Else it reads a file, through a cache that takes a changed one for the old.
        converter.load_tiktoken_bpe = lambda _: encoding._mergeable_ranks
        fast = converter.converted()
    # The text begins as training begins it, whatever the tokenizer's own file says.
    begins = [(begin, tokenizer.begin)]
    fast.post_processor = TemplateProcessing(f"{begin} $A", f"{begin} $A $B", begins)
    more: dict[str, Any] = {"split_special_tokens": not chat, "clean_up_tokenization_spaces": False}
    PreTrainedTokenizerFast(tokenizer_object=fast, **options, **more).save_pretrained(folder)


# ---------------------------------------------------------------- downstream tasks


def tasks(
    run: Path, names: Sequence[str], task_path: Path | None, allow_code: bool, **options: Any
) -> list[dict[str, Any]]:
    """Downstream tasks (E.3) by lm-evaluation-harness on the exported run, into RUN/tasks.json.

    The summary of the paper says "few-shot settings" without numbers, so each task keeps the
    library's: ifeval 0, mmlu_pro 5, bbh 3 with chains of thought, humaneval_plus 0. A fine-tuned
    run is asked in the chat format. `options` are the library's: limit, batch_size. Returns a row a
    metric; a group speaks for its tasks. Rows of this checkpoint's other tasks stay in the file.
    """
    config, chat = train.load_config(run), train.read_facts(run)["data"]["chat"]
    file, checkpoint = run / "tasks.json", train.find_checkpoint(run).name
    earlier = train.read_json(file) if file.exists() else []

    import lm_eval
    from lm_eval.tasks import TaskManager

    os.environ["HF_ALLOW_CODE_EVAL"] = str(int(allow_code))  # the metric of HumanEval asks for it
    manager: Any = TaskManager(include_path=task_path)
    if unknown := set(names) - set(manager.all_tasks):
        raise ValueError(f"--tasks {min(unknown)}: is not in lm_eval {lm_eval.__version__}'s tasks")
    with tempfile.TemporaryDirectory() as folder:
        export(run, Path(folder))
        dtype = "bfloat16" if config.dtype == "bf16" else "float32"
        try:
            found: Any = lm_eval.simple_evaluate(
                *("hf", {"pretrained": folder, "dtype": dtype}, list(names)),
                device="cuda" if torch.cuda.is_available() else "cpu",
                task_manager=manager,
                bootstrap_iters=1000,  # of metrics that are no means: no closed form of the error
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
                confirm_run_unsafe_code=allow_code,
                **options,
            )
        except Exception as error:  # all that a task file and its data can do wrong
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"--tasks {','.join(names)}: {reason}") from error
    about = {"limit": options["limit"], "chat": chat, "checkpoint": checkpoint}
    about["lm_eval"] = lm_eval.__version__
    parts = {part for group in found.get("groups", {}) for part in found["group_subtasks"][group]}
    rows = []
    for task, values in found["results"].items():
        keys = [key for key in values if "," in key and "_stderr," not in key]  # METRIC,FILTER
        for key in keys if task in names or task not in parts else ():
            row = {"task": task, "metric": key, "value": values[key], "n": values["sample_len"]}
            row |= {"stderr": values.get(key.replace(",", "_stderr,"))}
            rows.append(train.finite(row | {"shots": found["n-shot"].get(task)} | about))
    done = {row["task"] for row in rows}
    kept = [r for r in earlier if r["checkpoint"] == checkpoint and r["task"] not in done]
    train.write_json(file, kept + rows)
    return rows


# ---------------------------------------------------------------- what a run recorded
# A row is what a run's summary holds, with `arm` (its settings without the seed), `seed`, and
# `base`: the arm that it is compared with, seed by seed.

# Columns of intervals.jsonl that are no statistic of a synchronisation. All others are, also those
# that a fork adds, and appear in the table and in the picture of the controller.
NO_STATISTIC = {f.name for kind in (autoloco.Plan, autoloco.Decision) for f in fields(kind)} | {
    *("step", "exposure", "tokens", "tokens_per_step", "finite", "excluded", "checksum"),
    *("payload_bytes", "sent_bytes", "local_seconds", "sync_seconds"),
}
HELD = ("moderate", "severe", "nonfinite")  # verdicts after which the controller holds back
TASK_COLUMNS = ("task", "metric", "value", "stderr", "n", "shots", "limit", "lm_eval")


def settings(config: train.Config) -> list[str]:
    """Recipe, method, and what differs from the recipe, the seed apart."""
    usual = asdict(train.usual(config.recipe))
    idle = train.RESUME_MAY_CHANGE | {"recipe", "method", "seed", "init_from"}
    changed = [
        f"{name.replace('_', '-')} {value}"
        for name, value in asdict(config).items()
        if name not in idle and value != usual[name]
    ]
    return [config.recipe, config.method, *changed]


@dataclass(frozen=True)
class Run:
    """What a run folder holds: totals, a row of `metrics` a step, of `intervals` a
    synchronisation, of `scores` a metric of a downstream task.
    """

    path: Path
    config: train.Config
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    intervals: list[dict[str, Any]]
    scores: list[dict[str, Any]]
    program: str  # hash of the files that decide what it computed

    @cached_property
    def settings(self) -> list[str]:
        """Those of the config, the program, and how far the run is if it is not finished."""
        done, steps = len(self.metrics), self.config.steps
        partly = [f"{done:,} of {steps:,} steps"] * (done < steps)
        return [*settings(self.config), f"program {self.program}", *partly]

    @cached_property
    def arm(self) -> str:
        """The settings, which leave out the seed, in one line."""
        return ", ".join(self.settings)

    @cached_property
    def smoothed(self) -> list[float]:
        """Training loss averaged over 2 % of the run's steps up to each step, as in the summary.

        A step whose loss is null, since a worker was not finite, is left out.
        """
        losses = pandas.Series([row["loss"] for row in self.metrics], dtype=float)
        return losses.rolling(max(1, self.config.steps // 50), min_periods=1).mean().tolist()

    @cached_property
    def medians(self) -> pandas.DataFrame:
        """Median of every named statistic of a synchronisation (columns) by horizon (rows)."""
        frame = pandas.DataFrame(self.intervals)
        named = frame[[name for name in frame if name not in NO_STATISTIC]]
        return named.astype(float).groupby(frame["horizon"]).median()

    @property
    def update_norms(self) -> dict[int, float]:
        """Horizon -> median norm of the outer update (4.3)."""
        return self.medians["update_norm"].dropna().to_dict()

    @property
    def validated(self) -> dict[int, float]:
        """Step -> validation loss on the way and, of a finished run, at the end."""
        rows = [*self.metrics, self.summary | {"step": self.config.steps}]
        return {r["step"]: r["val_loss"] for r in rows if r.get("val_loss") is not None}

    @cached_property
    def row(self) -> dict[str, Any]:
        """The run as a row of `results`; of one that is not finished, the totals so far."""
        steps = [row["steps"] for row in self.intervals]
        held = [row for row in self.intervals if row["verdict"] in HELD]
        so_far = {
            "synchronisations": sum(steps) if self.config.method == "ddp" else len(steps),
            "intervals": diloco.run_lengths(steps),
            "payload_bytes": sum(row["payload_bytes"] for row in self.intervals),
            "saved": None,
            "train_loss": self.smoothed[-1],
            "val_loss": [None, *self.validated.values()][-1],
            "held": [f"{row['interval']}: {row['reason']}" for row in held],
        }
        return {"arm": self.arm, "seed": self.config.seed} | so_far | self.summary


def read_run(path: Path) -> Run:
    """A run's records; it need not be finished."""
    config = train.load_config(path)
    metrics, log = (autoloco.read_rows(path / f"{name}.jsonl")[0] for name in train.LOGS)
    intervals = [row for row in log if "rules" not in row]  # without the headers
    if not metrics or not intervals:
        raise ValueError(f"{path}: has not synchronised once")
    files = path / "summary.json", path / "tasks.json"
    summary, scores = (train.read_json(file) if file.exists() else {} for file in files)
    program = train.read_facts(path).get("source_sha256", "")[:8]
    return Run(path, config, summary, metrics, intervals, list(scores), program)


# ---------------------------------------------------------------- tables


def table(head: str, rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; `head` names the columns, separated by |."""
    names = [name.strip() for name in head.split("|")]
    lines = [names, ["---"] * len(names), *([str(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def spread(values: Sequence[Any], sign: str = "") -> str:
    """Mean and, from two values on, their sample standard deviation; `-` where one is null."""
    if not values or None in values:
        return "-"
    mean = format(statistics.fmean(values), f"{sign}.4f")
    return mean + (f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else "")


def by_arm(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows that differ only in their seed, in the order of their first."""
    arms: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        arms.setdefault(row["arm"], []).append(row)
    return arms


def paired(group: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> list[float]:
    """Validation loss minus that of the base's run of the same seed; negative is better."""
    other = {row["seed"]: row["val_loss"] for row in base}
    pairs = [(row["val_loss"], other.get(row["seed"])) for row in group]
    return [one - two for one, two in pairs if one is not None and two is not None]


def results(rows: Sequence[dict[str, Any]]) -> str:
    """Losses with their spread over seeds, paired differences, and what was sent."""
    arms, lines = by_arm(rows), []
    for name, group in arms.items():
        against, shares = group[0].get("base"), [row["saved"] for row in group]
        differences = paired(group, arms.get(against or "", [])) if against != name else []
        below = sum(difference < 0 for difference in differences)
        counts = sorted({row["synchronisations"] for row in group})
        cells = (
            name,
            len(group),
            *(spread([row[key] for row in group]) for key in ("train_loss", "val_loss")),
            spread(differences, "+"),
            f"{below} of {len(differences)}" if differences else "-",
            " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1]))),
            sum(len(row["held"]) for row in group),
            f"{statistics.fmean(row['payload_bytes'] for row in group) / 1e6:,.1f} MB",
            "-" if None in shares else train.saved_words(statistics.fmean(shares)),
        )
        lines.append(cells)
    head = "arm | seeds | train loss | val loss | difference | below | syncs | held back | payload"
    return table(f"{head} | against DiLoCo", lines)


def labels(runs: Sequence[Run]) -> tuple[dict[str, str], str]:
    """Arm -> its method and the settings that not all arms share; and those that they share."""
    shared = set.intersection(*(set(one.settings) for one in runs))
    names = {}
    for one in runs:
        own = [part for at, part in enumerate(one.settings) if at == 1 or part not in shared]
        names[one.arm] = ", ".join(own).replace("$", r"\$")  # which would begin a formula in a plot
    return names, ", ".join(part for part in runs[0].settings if part in shared)


def report(runs: Sequence[Run]) -> str:
    """Markdown tables: results, synchronisations with intervals (F.2, 4.3), tasks (E.3)."""
    names, shared = labels(runs)
    # A run is compared with the first DiLoCo of its own recipe: elsewhere the text is another.
    bases = {r.config.recipe: names[r.arm] for r in runs[::-1] if r.config.method == "diloco"}
    rows = [r.row | {"arm": names[r.arm], "base": bases.get(r.config.recipe)} for r in runs]
    # Of DDP each step is a round; schedules with many horizons have no room in a table.
    local = [r for r in runs if r.config.method != "ddp" and len(r.medians) <= 16]
    seen = list(dict.fromkeys(name for one in local for name in one.medians))
    lines = []
    for one in local:
        medians = [one.medians.reindex(columns=seen)[name].dropna() for name in seen]
        cells = (", ".join(f"{h}: {value:.3g}" for h, value in each.items()) for each in medians)
        lines.append([one.path.name, diloco.format_runs(one.row["intervals"]), *cells])
    scores = [
        [one.path.name, *(row[key] for key in TASK_COLUMNS)] for one in runs for row in one.scores
    ]
    text = f"### Results: {shared}\n\n{results(rows)}\n± is the standard deviation over seeds. "
    text += f"The difference in validation loss is to: {' or '.join(bases.values()) or '-'}.\n\n"
    text += "### Executed intervals (F.2), median by horizon of each statistic (4.3)\n\n"
    text += "Without schedules of more than 16 different horizons.\n\n"
    text += table(" | ".join(["run", "intervals", *seen]).replace("_", " "), lines)
    if scores:
        text += "\n### Tasks (E.3)\n\n" + table(" | ".join(["run", *TASK_COLUMNS]), scores)
    return text


# ---------------------------------------------------------------- plots


def draw(runs: Sequence[Run], folder: Path) -> None:
    """Writes loss.png, and controller-RUN.png of each run with a controller."""
    folder.mkdir(parents=True, exist_ok=True)
    controlled = [one for one in runs if one.intervals[0]["phase"] != "fixed"]
    figures = {f"controller-{one.path.name}": controller_figure(one) for one in controlled}
    for name, figure in ({"loss": loss_figure(runs)} | figures).items():
        figure.savefig(folder / f"{name}.png", dpi=120)
        print(f"wrote {folder / f'{name}.png'}")


def loss_figure(runs: Sequence[Run]) -> Figure:
    """A colour an arm: left against steps, right against payload."""
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names, late, sent = labels(runs)[0], [], []
    colours = {arm: f"C{at}" for at, arm in enumerate(names)}
    for one in runs:
        losses, look = one.smoothed, {"color": colours[one.arm], "lw": 1.3, "ms": 5}
        left.plot(range(1, 1 + len(losses)), losses, label=names.pop(one.arm, None), **look)
        left.plot([*one.validated], [*one.validated.values()], "o", **look)
        payload = list(accumulate(row["payload_bytes"] / 1e6 for row in one.intervals))
        right.plot(payload, [losses[row["step"] - 1] for row in one.intervals], **look)
        late += [value for value in losses[len(losses) // 10 :] if value == value]
        sent += [payload[-1]] if one.config.method != "ddp" else []
    left.set(xlabel="step", ylabel="loss, nats a token", title="training; dots: validation")
    left.set_ylim(top=max(late, default=None))  # without the fall of the first steps
    left.legend(fontsize=8)
    # DDP sends so much that every other curve would be a vertical line: there its own is cut.
    right.set_xlim(0, max(sent, default=None))
    right.set(xlabel="payload of a worker, MB", title="the same by what was sent")
    return figure


def controller_figure(one: Run) -> Figure:
    """Horizons with their verdicts, every statistic of a synchronisation, the corrections."""
    rows = pandas.DataFrame(one.intervals).set_index("step")
    names = [*one.medians, "z", "interval_ratio", "momentum", "step_scale"]
    figure = Figure(figsize=(9, 12), layout="constrained")
    first, *panels = figure.subplots(1 + len(names), 1, sharex=True)
    first.step(rows.index, rows["horizon"], where="pre", color="0.7", lw=1)
    for verdict, judged in rows.groupby("verdict"):
        first.plot(judged.index, judged["horizon"], "o", ms=5, label=verdict)
        first.legend(fontsize=8, ncols=5)
    first.set(ylabel="horizon", title=f"{one.path.name}: verdicts".replace("$", r"\$"))
    for panel, name in zip(panels, names, strict=True):
        panel.plot(rows.index, rows[name].astype(float), ".-", lw=0.8, ms=4)
        panel.set(ylabel=name.replace("_", " "))
        for limit in (autoloco.SUPPORTS, autoloco.MODERATE) if name == "z" else ():
            panel.axhline(limit, ls=":", color="C3")
    panels[-1].set(xlabel="step")
    return figure


# ---------------------------------------------------------------- command line


def main(argv: list[str]) -> int:
    """Command line; exit code 2 and one line for the user's mistakes."""
    try:
        given = vars(_parser().parse_args(argv))
        called, run = given.pop("command"), given["run"]
        if called == "loss":
            words = "{val_loss:.4f} nats a token, {bits_per_byte:.4f} bits per byte"
            print(f"{words}, over {{val_tokens:,.0f}} tokens".format(**loss(run)))
        elif called == "sample":
            print(sample(**given))
        elif called == "export":
            export(**given)
            print(f"wrote {given['folder']}")
        elif called == "tasks":
            cells = ([row[name] for name in TASK_COLUMNS] for row in tasks(**given))
            print(f"{table(' | '.join(TASK_COLUMNS), cells)}\nwrote {run / 'tasks.json'}")
        elif called == "report":
            runs = [read_run(path) for path in dict.fromkeys(run)]
            print(report(runs), end="")
            if given["out"]:
                draw(runs, given["out"])
    except (ValueError, OSError, ImportError) as error:
        need = f"; pip install transformers, '{HARNESS}'" if isinstance(error, ImportError) else ""
        print(f"eval.py: {error}{need}", file=sys.stderr)
        return 2
    return 0


def _parser() -> train.Parser:
    shown_as_it_is = argparse.RawDescriptionHelpFormatter
    parser = train.Parser("eval.py", description=__doc__, formatter_class=shown_as_it_is)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, words: str, **runs: Any) -> Callable[..., Any]:
        one = commands.add_parser(name, help=words, description=words, allow_abbrev=False)
        one.add_argument("run", type=Path, metavar="RUN", help="run folder", **runs)
        return one.add_argument

    command("loss", "validation loss and bits per byte")
    add = command("sample", "continue a text")
    add("--prompt", default="", help="text to continue, or to answer")
    add("--tokens", type=int, default=200, help="most new ones, within --seq-len [200]")
    add("--temperature", type=float, default=0.8, help="0: likeliest token [0.8]")
    add("--seed", type=int, default=0, help="of the draw [0]")
    add = command("export", "write a Hugging Face folder with its tokenizer")
    add("folder", type=Path, metavar="DIR", help="a new folder")
    add = command("tasks", "downstream tasks through lm-evaluation-harness, into RUN/tasks.json")
    names = {"required": True, "type": lambda text: text.replace(" ", "").split(",")}
    add("--tasks", dest="names", **names, metavar="NAME,...", help="such as ifeval,mmlu_pro,bbh")
    add("--task-path", type=Path, metavar="DIR", help="task YAML, its data paths seen from here")
    add("--limit", type=int, help="only the first documents of each task")
    add("--batch-size", type=int, default=8, help="most prompts at once [8]")
    add("--allow-code", action="store_true", help="run what the model writes")
    add = command("report", "tables and plots of runs, finished or not", nargs="+")
    add("--out", type=Path, metavar="DIR", help="receives the plots")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
