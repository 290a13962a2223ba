"""Look at a finished run: its loss, a sample, downstream tasks, its weights for other programs.

    python eval.py loss RUN                   # token-averaged loss, bits per byte
    python eval.py sample RUN --prompt TEXT
    python eval.py tasks RUN --tasks ifeval,mmlu_pro,bbh,humaneval_plus --allow-code
    python eval.py export RUN DIR             # a Hugging Face Llama folder
    python eval.py report RUN ... --out DIR   # tables of finished runs, and plots

RUN is a run folder; its latest whole checkpoint is read. Draws from its own generator.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cached_property, partial
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import Any

import tiktoken
import torch
from torch import Tensor

import autoloco
import data
import diloco
import model
import train

HARNESS = "lm_eval[ifeval]==0.4.13"  # EleutherAI's lm-evaluation-harness: optional, `tasks` only
# What the paper reports (E.3): IFEval and IFBench; MMLU-Pro and BBH; HumanEval+. Of a task that
# has one of them only these are kept, of any other task all metrics.
PAPER_METRICS = {"prompt_level_strict_acc", "prompt_level_loose_acc", "exact_match", "pass@1"}
# Of verdicts in plots.
MARKS = {"supports": "^", "consistent": "o", "moderate": "s", "severe": "v", "nonfinite": "X"}


def open_run(path: Path) -> tuple[train.Config, model.Transformer]:
    """Configuration and synchronised model of a run.

    Args:
        path: a run folder.
    Returns:
        The run's config, and the model in fp32 on the best device.
    Raises:
        ValueError: no run there, one of another version, or no whole checkpoint.
    """
    config = train.load_config(path)
    network = model.Transformer(train.run_shape(path))
    network.load_state_dict(dict(train.load_weights(path)))
    return config, network.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def loss(path: Path) -> dict[str, float]:
    """Validation loss of a run's checkpoint (E.1), as training measures it at its end.

    Args:
        path: a run folder.
    Returns:
        `val_loss` in nats a token (after fine-tuning, an assistant token), `bits_per_byte`,
        `val_tokens`.
    """
    config, network = open_run(path)
    ranks = diloco.Ranks(0, 1, config.workers, device=network.embedding.device)
    revision = train.read_facts(path)["data"].get("revision", "")  # of a dataset on the hub
    return train.validate(network, train.open_source(config, revision), ranks, config.dtype)


# ---------------------------------------------------------------- text


@torch.no_grad()
def generate(
    network: model.Transformer,
    prompts: Tensor,
    most: int,
    finished: Callable[[list[int]], bool],
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
) -> list[list[int]]:
    """Continue prompts of one length token by token, with a key-value cache.

    Equal lengths need neither padding nor a mask: a row's text is what it would be alone.

    Args:
        network: the model.
        prompts: (B, T) int64, T at least 1.
        most: largest number of new tokens of a row.
        finished: told a row's new tokens, the last one just drawn: whether the row ends there.
        temperature: 0 takes the likeliest token.
        top_k: draw from the k likeliest; 0 from all.
        seed: of the own generator.
    Returns:
        The new tokens of each row, the one that finished it included.
    """
    generator = torch.Generator(network.embedding.device).manual_seed(seed)
    cache, inputs = model.Cache(), prompts.to(network.embedding.device)
    new: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # those that go on, in the order of `inputs`
    for _ in range(min(most, network.config.max_seq_len - prompts.shape[1])):
        logits = network.logits(inputs, cache, last=True)[:, -1]  # (B, V)
        if temperature == 0:
            inputs = logits.argmax(-1, keepdim=True)  # (B, 1)
        else:
            if top_k:
                least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < least, -torch.inf)
            weights = (logits / temperature).softmax(-1)
            inputs = torch.multinomial(weights, 1, generator=generator)
        for row, token in zip(rows, inputs.view(-1).tolist(), strict=True):
            new[row].append(token)
        going = [at for at, row in enumerate(rows) if not finished(new[row])]
        if not going:
            break
        if len(going) < len(rows):
            rows, inputs = [rows[at] for at in going], inputs[going]
            cache.keys = {layer: keys[going] for layer, keys in cache.keys.items()}
            cache.values = {layer: values[going] for layer, values in cache.values.items()}
    return new


@torch.no_grad()
def log_likelihoods(
    network: model.Transformer, context: Sequence[int], continuations: Sequence[Sequence[int]]
) -> list[tuple[float, bool]]:
    """log p(continuation | context) of the answers to one question, which is read once.

        sum over i of log p(y_i | context, y_1 .. y_{i-1})

    Args:
        network: the model.
        context: token ids x, at least one.
        continuations: token ids y of each answer.
    Returns:
        Of each answer the sum in nats, and whether each of its tokens is the likeliest.
    """

    def tensor(ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, device=network.embedding.device)

    read = model.Cache()
    first = network.logits(tensor(context)[None], read, last=True)[0]  # (1, V)
    found = []
    for y in continuations:
        logits = first
        if len(y) > 1:
            cache = model.Cache()  # a branch: extending it leaves `read` as it is
            cache.length, cache.keys, cache.values = read.length, {**read.keys}, {**read.values}
            logits = torch.cat((first, network.logits(tensor(y[:-1])[None], cache)[0]))
        logits, targets = logits[: len(y)], tensor(y).long()  # (len(y), V), (len(y),)
        nats = logits.log_softmax(-1).gather(1, targets[:, None]).sum(dtype=torch.float64)
        found.append((float(nats), bool((logits.argmax(-1) == targets).all())))
    return found


def open_tokenizer(config: train.Config) -> tuple[tiktoken.Encoding, int, set[int]]:
    """Tokenizer of a run without its data, which may be far away.

    Args:
        config: of the run.
    Returns:
        The encoding; the token that begins a text; those that end one, in chat a turn's end too.
    """
    folders = [Path(config.init_from), Path(config.init_from, "original")]
    path = Path(config.data)
    folders = folders * bool(config.init_from) + [path if path.is_dir() else path.parent]
    encoding, _ = data.load_tokenizer(config.tokenizer, folders)
    gpt2 = encoding.name == "gpt2"
    begin, end, *_, turn = data.GPT2_SPECIALS * 3 if gpt2 else data.BYTE_SPECIALS
    token = encoding.encode_single_token
    return encoding, token(begin), {token(end), token(turn) if config.chat else token(end)}


def render_chat(messages: Sequence[dict[str, str]], reply: bool = True) -> str:
    """A conversation as text in the format of `data.encode_chat`, special tokens by name.

    Args:
        messages: `role` and `content` of each turn.
        reply: begin an assistant's turn at the end; else leave the last turn open.
    Returns:
        The text. Its special tokens must be parsed, so unlike in training a message that spells
        one has it: the harness passes prompts on as text.
    """
    begin, _, start, end, turn = data.BYTE_SPECIALS
    text = begin
    for message in messages:
        text += f"{start}{message['role']}{end}\n\n{message['content'].strip()}{turn}"
    return f"{text}{start}assistant{end}\n\n" if reply else text.removesuffix(turn)


def sample(
    run: Path,
    prompt: str = "",
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> str:
    """A prompt and the run's continuation, after fine-tuning its answer.

    Args:
        run: a run folder.
        prompt: text.
        tokens: largest number of new tokens.
        temperature: 0 takes the likeliest token.
        top_k: draw from the k likeliest; 0 from all.
        seed: of the draw.
    Returns:
        The text.
    Raises:
        ValueError: a number out of range, or a prompt longer than the model reads.
    """
    if not 0 <= temperature < math.inf or tokens < 1 or top_k < 0:
        raise ValueError("--temperature and --top-k: not below 0, --tokens: at least 1")
    config, network = open_run(run)
    encoding, begin, ends = open_tokenizer(config)
    ids = [begin, *data.encode(encoding, prompt).tolist()]
    if config.chat:
        turn = render_chat([{"role": "user", "content": prompt}])
        ids = encoding.encode(turn, allowed_special="all")
    if len(ids) >= network.config.max_seq_len:
        raise ValueError(f"--prompt: {len(ids)} tokens, too many for {run}")
    draw: dict[str, Any] = dict(temperature=temperature, top_k=top_k, seed=seed)
    [new] = generate(network, torch.tensor([ids]), tokens, lambda new: new[-1] in ends, **draw)
    answer = encoding.decode([token for token in new if token not in ends])
    return prompt + "\n\n" * config.chat + answer


# ---------------------------------------------------------------- downstream tasks


def harness_model(network: model.Transformer, config: train.Config, batch_size: int) -> Any:
    """A run's model behind the harness's interface `TemplateLM`.

    Args:
        network: the model.
        config: of its run.
        batch_size: most prompts that are continued together.
    Returns:
        A `TemplateLM`, whose log-likelihoods are in nats.
    """
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm

    encoding, begin, ends = open_tokenizer(config)
    longest = network.config.max_seq_len

    def ended(stops: tuple[str, ...], new: list[int]) -> bool:
        return new[-1] in ends or any(stop in encoding.decode(new) for stop in stops)

    class Model(TemplateLM):
        eot_token_id = min(ends)
        prefix_token_id = begin  # what a text without a context is conditioned on
        tokenizer_name = encoding.name
        cut = 0  # contexts that had to be shortened

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            return render_chat(chat_history, add_generation_prompt)

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            if config.chat and string.startswith(data.BYTE_SPECIALS[0]):  # from `render_chat`
                return encoding.encode(string, allowed_special="all")
            ids = data.encode(encoding, string).tolist()
            return ids if add_special_tokens is False else [begin, *ids]

        def fit(self, context: list[int], most: int) -> tuple[int, ...]:
            """The context's last tokens, which are nearest to the answer."""
            self.cut += len(context) > most
            return tuple(context[-most:])

        def _loglikelihood_tokens(self, requests: list, **_: Any) -> list[tuple[float, bool]]:
            pairs = []
            for _, context, answer in requests:
                if len(answer) > longest:
                    raise ValueError(f"an answer of {len(answer)} tokens, too many for this model")
                pairs.append((self.fit(context, longest + 1 - max(1, len(answer))), answer))
            found = []
            for context, alike in groupby(tqdm(pairs, disable=None), key=lambda pair: pair[0]):
                found += log_likelihoods(network, context, [answer for _, answer in alike])
            return found

        def loglikelihood_rolling(self, requests: list, **_: Any) -> list[float]:
            sums = []
            for request in tqdm(requests, disable=None):
                ids = self.tok_encode(request.args[0], add_special_tokens=False)
                windows = get_rolling_token_windows(ids, begin, longest, context_len=1)
                pairs = [make_disjoint_window(window) for window in windows]
                sums.append(sum(log_likelihoods(network, x, [y])[0][0] for x, y in pairs))
            return sums

        def generate_until(self, requests: list, **_: Any) -> list[str]:
            jobs = []
            for place, request in enumerate(requests):
                options: dict[str, Any] = dict(normalize_gen_kwargs(request.args[1], 256))
                if options["do_sample"]:
                    raise ValueError(f"{request.task_name}: draws its texts; only greedy ones here")
                # Half of the positions are the prompt's, however much a task wants to generate.
                room = max(longest - options["max_gen_toks"], longest // 2)
                prompt = self.fit(self.tok_encode(request.args[0]), room)
                stops = tuple(stop for stop in options["until"] if stop)
                jobs.append((-len(prompt), options["max_gen_toks"], stops, place, prompt))
            texts = [""] * len(jobs)
            progress = tqdm(total=len(jobs), disable=None)
            for (_, most, stops), group in groupby(sorted(jobs), key=lambda job: job[:3]):
                rows = list(group)
                for batch in (rows[at : at + batch_size] for at in range(0, len(rows), batch_size)):
                    prompts = torch.tensor([job[-1] for job in batch])
                    news = generate(network, prompts, most, partial(ended, stops))
                    for job, new in zip(batch, news, strict=True):
                        text = encoding.decode([token for token in new if token not in ends])
                        for stop in stops:
                            text = text.split(stop)[0]
                        texts[job[3]] = text
                    progress.update(len(batch))
            return texts

    return Model()


def find_tasks(names: Sequence[str], folder: Path | None) -> tuple[Any, bool]:
    """The harness's index of tasks.

    Args:
        names: tasks, groups or tags that it must have.
        folder: of local task YAML; its tasks come before the library's of the same name.
    Returns:
        A `TaskManager`, and whether all the names are local, so that nothing needs the hub.
    Raises:
        ValueError: a name is unknown; the near ones are named.
    """
    from lm_eval import __version__
    from lm_eval.tasks import TaskManager

    own = "none"
    if folder:
        if not folder.is_dir():
            raise ValueError(f"--task-path {folder}: is no folder")
        local = TaskManager(include_path=folder, include_defaults=False)
        own = ", ".join(local.all_tasks) or own
        groups = [local.task_index[group].cfg or {} for group in local.all_groups]
        members = [one for group in groups for one in group["task"] if isinstance(one, str)]
        if set(local.all_tasks).issuperset([*names, *members]):
            return local, True  # without the 8 s of indexing the library's own 14,000 tasks
    manager = TaskManager(include_path=folder)
    for name in names:
        if name not in manager.all_tasks:
            known = [other for other in manager.all_tasks if other[:2] == name[:2]]
            near = ", ".join(get_close_matches(name, known, 5, 0)) or "none"
            raise ValueError(
                f"--tasks {name}: lm_eval {__version__} has no such task, near ones are {near}; "
                + (f"{folder} has {own}" if folder else "--task-path DIR adds local ones")
            )
    return manager, False


def tasks(
    run: Path,
    names: Sequence[str],
    task_path: Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    chat: bool | None = None,
    allow_code: bool = False,
) -> list[dict[str, Any]]:
    """Downstream tasks (E.3) through lm-evaluation-harness, with its few-shot settings.

    The summary of the paper says "few-shot settings" without numbers, so each task keeps the
    library's: ifeval 0, mmlu_pro 5, bbh 3 with chains of thought, humaneval_plus 0.

    Args:
        run: a run folder; its `tasks.json` is extended by the rows returned.
        names: tasks or groups, such as mmlu_pro.
        task_path: folder of task YAML; if it has all `names`, nothing is looked up on the hub.
        limit: only the first documents of each task.
        batch_size: most prompts that are continued together.
        chat: put prompts into the chat format; by default for a fine-tuned run.
        allow_code: run the programs that the model writes, unprotected.
    Returns:
        A row a metric: `task metric filter value stderr n shots limit chat checkpoint lm_eval`;
        stderr is None where the library has none.
    Raises:
        ValueError: the library is missing, a task unknown or its data out of reach, or code not
            allowed.
    """
    if batch_size < 1 or (limit is not None and limit < 1):
        raise ValueError("--limit and --batch-size: at least 1")
    try:
        import datasets
        import evaluate
        import lm_eval
        from huggingface_hub import constants
    except ImportError as error:
        raise ValueError(f"tasks needs a library, pip install '{HARNESS}' ({error})") from error
    config = train.load_config(run)
    chat = config.chat if chat is None else chat
    if chat and not config.chat:
        raise ValueError(f"--chat: {run} was not trained on conversations")
    file, checkpoint = run / "tasks.json", train.find_checkpoint(run).name
    earlier = train.read_json(file) if file.exists() else []
    manager, offline = find_tasks(names, task_path)
    for name in names:
        if not allow_code and (manager.task_index[name].cfg or {}).get("unsafe_code"):
            raise ValueError(f"--tasks {name}: runs what the model writes; give --allow-code")
    if allow_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # which the metric of HumanEval asks for
    if not offline and not constants.HF_HUB_OFFLINE:
        try:
            data._reach(constants.ENDPOINT, "{}")
        except ValueError as error:  # now; the libraries retry each file for 23 s
            print(f"{error}: reading only what was downloaded before", file=sys.stderr)
            offline = True
    if offline:  # not in the environment: these libraries read it when they were imported
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        evaluate.config.HF_EVALUATE_OFFLINE = True

    loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}}
    for name in names:
        try:
            found = manager.load([name])
        except Exception as error:  # all that a task file and its data can do wrong
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            remedy = f"; pip install '{HARNESS}'" if isinstance(error, ImportError) else ""
            raise ValueError(f"--tasks {name}: {reason}{remedy}") from error
        loaded["tasks"] |= found["tasks"]
        loaded["groups"] |= found["groups"]
    for name, task in loaded["tasks"].items():
        # As lm_eval's own command does before it evaluates.
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=1234)
        if chat and task.get_config("unsafe_code") and not task.get_config("gen_prefix"):
            print(f"warning: {name} gives code to continue: try --no-chat", file=sys.stderr)
    _, network = open_run(run)
    harness = harness_model(network, config, batch_size)
    narrow = torch.autocast(network.embedding.device.type, torch.bfloat16, config.dtype == "bf16")
    with torch.no_grad(), narrow:
        results: Any = lm_eval.evaluate(
            harness,
            loaded,
            limit=limit,
            bootstrap_iters=1000,  # for metrics that are no means, whose error has no closed form
            log_samples=False,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            confirm_run_unsafe_code=allow_code,
        )
    if harness.cut:
        print(f"warning: {harness.cut} contexts were cut to the model's length", file=sys.stderr)

    def number(value: Any) -> float | None:
        known = isinstance(value, int | float) and math.isfinite(value)
        return float(value) if known else None  # the library writes "N/A"

    rows: list[dict[str, Any]] = []
    common = dict(limit=limit, chat=chat, checkpoint=checkpoint, lm_eval=lm_eval.__version__)
    parts = [results["group_subtasks"][group] for group in results.get("groups", {})]
    for name, values in results["results"].items():
        if name not in names and name in chain(*parts):
            continue  # its group speaks for it
        metrics = [key.split(",") for key in values if "," in key and "_stderr," not in key]
        for metric, answer in [m for m in metrics if m[0] in PAPER_METRICS] or metrics:
            row: dict[str, Any] = dict(task=name, metric=metric, filter=answer)
            row["value"] = number(values[f"{metric},{answer}"])
            row["stderr"] = number(values.get(f"{metric}_stderr,{answer}"))
            row |= dict(n=values["sample_len"], shots=results["n-shot"].get(name))
            rows.append(row | common)
    done = {row["task"] for row in rows}
    kept = [r for r in earlier if r["checkpoint"] == checkpoint and r["task"] not in done]
    train.write_json(file, kept + rows)
    return rows


def task_table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of `tasks` as a Markdown table."""
    shown = ("task", "metric", "value", "stderr", "n", "shots", "limit", "lm_eval")
    values = ([row[name] for name in shown] for row in rows)
    cells = ([f"{x:.4f}" if isinstance(x, float) else x for x in line] for line in values)
    return table(" | ".join(shown), cells)


# ---------------------------------------------------------------- reports of finished runs
# A row is what a run's summary holds, with `arm` (its settings without the seed), `seed`, and
# `base`: the arm that it is compared with, seed by seed.


@dataclass(frozen=True)
class Run:
    """What a run folder recorded.

    Args:
        path: the folder.
        config: its configuration.
        rules: the constants that its log was written under.
        summary: its totals and final losses.
        metrics: a row a step.
        intervals: a row a synchronisation.
    """

    path: Path
    config: train.Config
    rules: autoloco.Rules
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    intervals: list[dict[str, Any]]

    @cached_property
    def arm(self) -> str:
        """The run's settings apart from its seed, as the command line gives them."""
        recipe = train.Config(**{"recipe": self.config.recipe, **train.RECIPES[self.config.recipe]})
        idle = train.RESUME_MAY_CHANGE | {"recipe", "method", "seed", "init_from"}
        settings, usual = asdict(self.config), asdict(recipe)
        changed = [
            f"{name.replace('_', '-')} {value}"
            for name, value in settings.items()
            if name not in idle and value != usual[name]
        ]
        return ", ".join([f"{self.config.recipe} {self.config.method}", *changed])

    @cached_property
    def smoothed(self) -> list[float]:
        """Training loss averaged over 2 % of the run's steps up to each step, as in the summary.

        A step whose loss is null, since a worker was not finite, is left out.
        """
        losses = [row["loss"] for row in self.metrics]
        sums = [0.0, *accumulate(loss or 0.0 for loss in losses)]
        known = [0, *accumulate(loss is not None for loss in losses)]
        window, out = max(1, len(losses) // 50), []
        for end in range(1, len(sums)):
            start = max(0, end - window)
            count = known[end] - known[start]
            out.append((sums[end] - sums[start]) / count if count else math.nan)
        return out

    @property
    def update_norms(self) -> dict[int, float]:
        """Horizon -> median norm of the outer update (4.3)."""
        norms: dict[int, list[float]] = {}
        for row in self.intervals:
            if row["update_norm"] is not None:
                norms.setdefault(row["horizon"], []).append(row["update_norm"])
        return {horizon: statistics.median(norms[horizon]) for horizon in sorted(norms)}

    @property
    def row(self) -> dict[str, Any]:
        """The run as a row of `results`."""
        verdicts = Counter(row["verdict"] for row in self.intervals if row["verdict"])
        seed = {"arm": self.arm, "seed": self.config.seed}
        losses = self.smoothed
        quarters = {
            f"after {percent} %": losses[max(1, len(losses) * percent // 100) - 1]
            for percent in (25, 50, 75, 100)
        }
        held = [
            f"{row['interval']}: {row['reason']}"
            for row in self.intervals
            if row["verdict"] in ("moderate", "severe", "nonfinite")
        ]
        more = {"verdicts": dict(verdicts), "held": held, "quarters": train.finite(quarters)}
        return seed | self.summary | more


def read_run(path: Path) -> Run:
    """Read a finished run.

    Raises:
        ValueError: naming the missing or damaged file.
    """
    config, summary = train.load_config(path), train.read_json(path / "summary.json")
    rules, intervals, warning = autoloco.read_log(str(path / "intervals.jsonl"))
    if warning:
        print(warning, file=sys.stderr)
    try:
        metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        raise ValueError(f"{path / 'metrics.jsonl'}: missing or damaged") from None
    run = Run(path, config, rules, summary, metrics, intervals)
    needed = {"train_loss", "val_loss", "seconds", "payload_bytes", "saved"}
    try:
        whole = len(run.smoothed) == sum(row["steps"] for row in intervals) == config.steps
        whole = whole and bool(run.row and run.update_norms) and summary.keys() >= needed
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a finished run ({error})") from None
    if not whole:
        raise ValueError(f"{path}: not a finished run (rows or totals are missing)")
    return run


def table(head: str, rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; `head` names the columns, separated by |."""
    names = [name.strip() for name in head.split("|")]
    lines = [names, ["---"] * len(names), *([str(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def spread(values: Sequence[float | None], sign: str = "") -> str:
    """Mean and, from two values on, their sample standard deviation; `-` where one is null."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return "-"
    mean = format(statistics.fmean(known), f"{sign}.4f")
    return mean + (f" ± {statistics.stdev(known):.4f}" if len(known) > 1 else "")


def between(values: Iterable[float | None]) -> str:
    """Smallest and largest value; None is a run that never came there."""
    values = list(values)
    known = sorted(value for value in values if value is not None)
    if not known:
        return "never"
    first, last = (f"{x:,.4g}" if isinstance(x, float) else f"{x:,}" for x in (known[0], known[-1]))
    never = f" ({len(values) - len(known)} never)" if len(known) < len(values) else ""
    return (first if first == last else f"{first} to {last}") + never


def by_arm(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows that differ only in their seed, in the order of their first."""
    arms: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        arms.setdefault(row["arm"], []).append(row)
    return arms


def paired(
    group: Sequence[dict[str, Any]],
    base: Sequence[dict[str, Any]],
    loss: Callable[[dict[str, Any]], float | None] = lambda row: row["val_loss"],
) -> list[float]:
    """Differences of a loss to the base's run of the same seed; negative is better."""
    other = {row["seed"]: loss(row) for row in base}
    pairs = [(loss(row), other[row["seed"]]) for row in group if row["seed"] in other]
    return [one - two for one, two in pairs if one is not None and two is not None]


def results(rows: Sequence[dict[str, Any]]) -> str:
    """Losses with their spread over seeds, paired differences, and what was sent."""
    arms, lines = by_arm(rows), []
    for name, group in arms.items():
        against, saved = group[0].get("base"), 100 * statistics.fmean(r["saved"] for r in group)
        differences = paired(group, arms.get(against or "", [])) if against != name else []
        below = sum(difference < 0 for difference in differences)
        lines.append(
            (
                name,
                len(group),
                spread([row["train_loss"] for row in group]),
                spread([row["val_loss"] for row in group]),
                spread(differences, "+") if differences else "-",
                f"{below} of {len(differences)}" if differences else "-",
                between(row["synchronisations"] for row in group),
                f"{statistics.fmean(row['payload_bytes'] for row in group) / 1e6:,.1f} MB",
                f"{saved:.1f} %",
                f"{statistics.fmean(row['seconds'] for row in group):,.0f} s",
            )
        )
    head = "arm | seeds | train loss | val loss | difference | below | syncs | payload | saved"
    return table(f"{head} | time", lines)


def report(runs: Sequence[Run]) -> str:
    """Markdown tables: results, threshold crossings (F.1), intervals (F.2, 4.3), tasks (E.3).

    Args:
        runs: finished runs; those that differ only in their seed make one arm.
    """
    base = next((one.arm for one in runs if one.config.method == "diloco"), None)
    parts = ["### Results\n", results([one.row | {"base": base} for one in runs])]
    words = "± is the standard deviation over seeds"
    if base:
        words += f"; differences of the validation loss are to `{base}`, seed by seed"
    parts.append(f"\n{words}.\n")
    arms: dict[str, list[Run]] = {}
    for one in runs:
        arms.setdefault(one.arm, []).append(one)

    last = min(one.smoothed[-1] for one in runs)
    early = max(one.smoothed[len(one.smoothed) // 4] for one in runs)
    levels = [last + (early - last) * share for share in (0.8, 0.6, 0.4, 0.2, 0.1, 0.05)]
    crossings = (
        (name, *(between(_crossing(one, level) for one in group) for level in levels))
        for name, group in arms.items()
    )
    parts.append("\n### First step below a smoothed training loss (F.1)\n")
    parts.append(table(" | ".join(["arm", *(f"{level:.3f}" for level in levels)]), crossings))

    intervals = (
        (
            one.path.name,
            diloco.format_runs(one.summary["intervals"]),
            *(
                between(row[key] for row in one.intervals)
                for key in ("interval_ratio", "momentum", "step_scale")
            ),
            ", ".join(f"{horizon}: {norm:.3g}" for horizon, norm in one.update_norms.items()),
        )
        for one in runs
        if len(one.update_norms) <= 16
    )
    parts.append("\n### Executed intervals (F.2), median update norm by horizon (4.3)\n")
    parts.append("Without schedules of more than 16 different horizons.\n\n")
    parts.append(table("run | intervals | rho | momentum | step scale | update norm", intervals))

    scores = []
    for one in runs:
        file = one.path / "tasks.json"
        try:
            for row in train.read_json(file) if file.exists() else ():
                cells = (row[key] for key in ("task", "metric", "value", "n"))
                scores.append((one.path.name, *cells))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file}: damaged ({error})") from None
    if scores:
        parts += ["\n### Tasks (E.3)\n", table("run | task | metric | value | n", scores)]
    return "".join(parts)


def _crossing(one: Run, level: float) -> int | None:
    return next((step for step, value in enumerate(one.smoothed, 1) if value <= level), None)


def draw(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Loss against steps and bytes; of each controlled run horizons, bands and corrections.

    Args:
        runs: finished runs.
        folder: receives `loss.png`, and `controller-RUN.png` for each run with a controller.
    Returns:
        The files.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    colours: dict[str, str] = {}
    for one in runs:
        new = one.arm not in colours
        style: dict[str, Any] = {"color": colours.setdefault(one.arm, f"C{len(colours)}")}
        style |= {"lw": 1.2, "alpha": 0.8, "label": one.arm if new else None}
        axes[0].plot([row["step"] for row in one.metrics], one.smoothed, **style)
        sent = list(accumulate(row["payload_bytes"] / 1e6 for row in one.intervals))
        axes[1].plot(sent, [one.smoothed[row["step"] - 1] for row in one.intervals], **style)
    low = min(min(one.smoothed) for one in runs)
    high = max(one.smoothed[len(one.smoothed) // 10] for one in runs)
    axes[0].set(xlabel="step", ylabel="training loss, nats a token", ylim=(low - 0.02, high))
    no_ddp = all(one.config.method != "ddp" for one in runs)
    axes[1].set(xlabel="payload of a worker, MB", xscale="linear" if no_ddp else "log")
    axes[1].legend(fontsize=8)
    files = [folder / "loss.png"]
    figure.savefig(files[0], dpi=120)
    plt.close(figure)
    for one in runs:
        if one.rules.sequence is None:
            figure, panels = plt.subplots(4, 1, figsize=(9, 10), sharex=True, layout="constrained")
            _draw_controller(one, panels)
            files.append(folder / f"controller-{one.path.name}.png")
            figure.savefig(files[-1], dpi=120)
            plt.close(figure)
    return files


def _draw_controller(one: Run, panels: Any) -> None:
    rows = one.intervals
    steps = [row["step"] for row in rows]
    panels[0].step(steps, [row["horizon"] for row in rows], where="pre", color="0.7", lw=1)
    for verdict, mark in MARKS.items():
        judged = [row for row in rows if row["verdict"] == verdict]
        if judged:
            at, horizons = [row["step"] for row in judged], [row["horizon"] for row in judged]
            panels[0].plot(at, horizons, mark, ms=5, label=verdict)
    panels[0].set(ylabel="horizon, steps", title=one.arm)
    if any(row["verdict"] for row in rows):
        panels[0].legend(fontsize=8, ncols=5, loc="lower right")
    for panel, name, sign in ((panels[1], "drift", 1), (panels[2], "coherence", -1)):
        bands = []
        for index, row in enumerate(rows):
            before = autoloco.replay(one.rules, rows[:index]).controller
            history = getattr(before, f"{name}_history")
            if row["z"] is not None and row[f"residual_{name}"] is not None:
                # A residual is a log ratio, so this is the statistic at another residual.
                limits = (_residual_at(z, history) for z in (autoloco.SUPPORTS, autoloco.MODERATE))
                apart = [sign * (limit - row[f"residual_{name}"]) for limit in limits]
                bands.append((row["step"], *(row[name] * math.exp(power) for power in apart)))
        panel.plot(steps, [row[name] for row in rows], ".-", lw=0.8, ms=4, label=name)
        if bands:
            ends, supports, moderate = zip(*bands, strict=True)
            panel.fill_between(ends, supports, moderate, alpha=0.25, label="consistent")
            panel.plot(ends, moderate, lw=0.8, color="C3", label="moderate from here")
        panel.set(ylabel=name)
        panel.legend(fontsize=8)
    panels[1].set(yscale="log")
    for name, words in (
        ("interval_ratio", "rho"),
        ("momentum", "momentum"),
        ("step_scale", "scale"),
    ):
        panels[3].step(steps, [row[name] for row in rows], where="pre", label=words)
    panels[3].set(xlabel="step", ylabel="outer correction")
    panels[3].legend(fontsize=8, loc="upper left")


def _residual_at(z: float, history: tuple[float, ...]) -> float:
    """The residual whose `autoloco.robust_z` is z: the score is linear in it."""
    at_zero, at_one = (autoloco.robust_z(residual, history) for residual in (0.0, 1.0))
    return (z - at_zero) / (at_one - at_zero)


# ---------------------------------------------------------------- command line


def main(argv: list[str]) -> int:
    """Command line; exit code 2 and one line for the user's mistakes."""
    parser = train._Parser(
        prog="eval.py",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, words: str) -> Callable[..., Any]:
        one = commands.add_parser(name, help=words, description=words, allow_abbrev=False)
        one.add_argument("run", type=Path, help="run folder")
        return one.add_argument

    command("loss", "validation loss and bits per byte")
    add = command("sample", "continue a text")
    add("--prompt", default="", help="text to continue, or to answer")
    add("--tokens", type=int, default=200, help="largest number of new tokens [200]")
    add("--temperature", type=float, default=0.8, help="0: likeliest token [0.8]")
    add("--top-k", type=int, default=50, help="draw from the k likeliest, 0: all [50]")
    add("--seed", type=int, default=0, help="of the draw [0]")
    add = command("tasks", "downstream tasks through lm-evaluation-harness, into RUN/tasks.json")
    names = {"required": True, "type": lambda text: text.replace(" ", "").split(",")}
    add("--tasks", dest="names", **names, metavar="NAME,...", help="such as ifeval,mmlu_pro,bbh")
    add("--task-path", type=Path, metavar="DIR", help="task YAML, its data paths seen from here")
    add("--limit", type=int, help="only the first documents of each task")
    add("--batch-size", type=int, default=8, help="most prompts of one length at once [8]")
    add("--chat", action=argparse.BooleanOptionalAction, help="chat format [after fine-tuning]")
    add("--allow-code", action="store_true", help="run what the model writes, unprotected")
    command("export", "write a Hugging Face Llama folder")("dir", type=Path)
    words = "tables of finished runs, and plots"
    reports = commands.add_parser("report", help=words, description=words, allow_abbrev=False)
    reports.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    reports.add_argument("--out", type=Path, metavar="DIR", help="receives the plots")
    try:
        given = vars(parser.parse_args(argv))
        called, run = given.pop("command"), given.get("run", Path())
        if called == "loss":
            measured = loss(run)
            print(
                f"{measured['val_loss']:.4f} nats a token, {measured['bits_per_byte']:.4f} "
                f"bits per byte, over {measured['val_tokens']:,.0f} tokens"
            )
        elif called == "sample":
            print(sample(**given))
        elif called == "tasks":
            print(f"{task_table(tasks(**given))}\nwrote {given['run'] / 'tasks.json'}")
        elif called == "export":
            _, network = open_run(run)
            model.save_hf(given["dir"], network.config, network.state_dict())
            print(f"wrote {given['dir']}")
        elif called == "report":
            runs = [read_run(path) for path in dict.fromkeys(given["runs"])]
            print(report(runs), end="")
            for path in draw(runs, given["out"]) if given["out"] else ():
                print(f"wrote {path}")
    except (ValueError, OSError) as error:  # such as a file where a folder should be written
        print(f"eval.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
