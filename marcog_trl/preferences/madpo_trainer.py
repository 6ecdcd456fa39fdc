"""
Multi-agent DPO: TRL's DPO on pairs of episodes of a team.

How a pair goes through TRL, whose methods are marked with *:

    __init__*                     loads the base model and makes the adapter; `_prepare_dataset` makes the examples
      the team's weights and modules are loaded, then `_precompute_ref_logps` runs the reference over all pairs, once
    train*                        checks the checkpoint to resume from, then TRL's loop (trainers/checkpointing.py)
      EpisodeCollator             2B sequences, each one an episode: its rows, one after the other
      _compute_loss*              TRL's loss, with an EpisodeModel in place of the model
        EpisodeModel              takes episodes apart into rows, sets the rows' agents, calls the model once (episodes.py)
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import tqdm
from datasets import Dataset
from peft import PeftConfig, set_peft_model_state_dict
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import DPOTrainer
from trl.models import prepare_deepspeed

from marcog_trl.agents import Workflow
from marcog_trl.heterogeneity.fold import save_adapters, split_adapter
from marcog_trl.preferences.episodes import ROW_KEYS, EpisodeCollator, EpisodeModel, make_examples
from marcog_trl.preferences.madpo_config import DIFFERENCES, MADPOConfig
from marcog_trl.preferences.pairs import check_identity, identity
from marcog_trl.team.base_models import load_tokenizer
from marcog_trl.team.description import ADAPTER_FILES, MODULES_FILE, TEAM_FILE, TeamDescription, dtype_of
from marcog_trl.team.dropout import disable_dropout
from marcog_trl.team.lending import lent
from marcog_trl.team.loading import (
    check_adapter,
    check_base,
    check_has_adapter,
    check_layers,
    find_team,
    load_modules,
    of_revision,
    reading,
    settings_with,
    warn_of_quantization,
)
from marcog_trl.team.modules import ForwardContext
from marcog_trl.team.team import Team
from marcog_trl.trainers.argument_checks import checkpoint_without_reentry
from marcog_trl.trainers.checkpointing import check_same_team
from marcog_trl.trainers.metrics import WindowMeans
from marcog_trl.trainers.sharing import Sharing


ALIKE = 0.1  # cosine distance of two agents' mean latents below which cores hardly tell them apart


class MADPOTrainer(Sharing, DPOTrainer):
    """
    Direct preference optimization of a team of LLM agents that share one model and one adapter.

    For an episode τ with the replies b of all agents, of turn k(b), with latents z:

        ρ(τ) = Σ_b γ_turn^k(b) Σ_t [log π_θ(y_bt | x_b, z_b) − log π_ref(y_bt | x_b, z_b)]
        loss = −log σ(β (ρ(chosen) − ρ(rejected)))

    A workflow is deterministic given replies and verdicts, so nothing but the agents' choices is random, and DPO's argument
    holds for whole episodes. With shared parameters the gradient is the sum of the agents' gradients. The adapter is trained
    and, in a team with latents, the core decoder; the networks that make latents are not. Every reply has the latent that it
    was played with, in the policy and in the reference.

    Example:

    ```python
    >>> from marcog_trl import MADPOConfig, MADPOTrainer, Team, collect_preferences, load_problems

    >>> team = Team.from_pretrained("outputs/quickstart")
    >>> pairs = collect_preferences(team, load_problems("builtin", "train"))
    >>> trainer = MADPOTrainer("outputs/quickstart", args=MADPOConfig("outputs/madpo"), train_dataset=pairs)
    >>> trainer.train()
    >>> trainer.save_model()
    ```

    Args:
        model (`str`): Folder or Hub repository of the saved team to train, which may be untrained (see
            [`save_untrained_team`]).
        ref_model (`str`, *optional*): Folder or repository of the saved team that is the reference. Defaults to `model`. Not
            used with `reference="none"`.
        args ([`MADPOConfig`], *optional*): Configuration.
        train_dataset (`Dataset`): Pairs of [`collect_preferences`].
        eval_dataset (`Dataset`, *optional*): Pairs to evaluate on.
        callbacks, optimizers, quantization_config: As in [`~trl.DPOTrainer`].
        workflow ([`Workflow`] or `str`, *optional*): The team's workflow, if it is neither a built-in one nor saved with the
            team: an instance, or a name such as `"my_team.py:Debate"`.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether to run the file of the saved team's workflow, as in
            [`Team.from_pretrained`].

    Attributes:
        team ([`Team`]): The team that is trained. Under ZeRO-3 it cannot play; save and load it.

    Raises:
        ValueError: Before the model is loaded, if `model` is not a saved team, or there are no pairs, or they are another team's, or
            all are longer than `max_length`.

    Source: DPO (https://huggingface.co/papers/2305.18290), on the pairs of CoMLRL's MADPO.
    """

    _tag_names = ["trl", "marcog-trl", "madpo"]
    _name = "MADPO"
    args: MADPOConfig
    data_collator: EpisodeCollator
    model: Any
    ref_model: Any

    def __init__(
        self,
        model: str | Path,
        ref_model: str | Path | None = None,
        args: MADPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        workflow: Workflow | str | None = None,
        trust_remote_code: bool = False,
    ):
        args = MADPOConfig("madpo") if args is None else args
        if not isinstance(args, MADPOConfig):
            raise TypeError(f"args is a {type(args).__name__}, but MADPOTrainer needs a MADPOConfig.")
        self.args = args  # TRL sets it too, but what is checked here reads it
        self._start = find_team(model)
        saved = TeamDescription.read(self._start / TEAM_FILE)
        check_has_adapter(f"model={str(model)!r}", saved)
        settings, _ = settings_with(self._start, saved, {}, workflow, trust_remote_code)
        self.workflow = settings.make_workflow(workflow)
        self.agents = [agent.name for agent in self.workflow.agents]
        check_adapter(self._start, saved)
        args.model_init_kwargs = of_revision(saved, cast(dict | None, args.model_init_kwargs))
        self._reference = self._start if ref_model is None else find_team(ref_model)
        check_same_team(f"ref_model={str(ref_model)!r}", self._reference, saved, but=("trainer",))
        self._problems = _prompts_of(train_dataset)
        tokenizer = load_tokenizer(self._start)
        weights = load_file(self._start / MODULES_FILE) if settings.has_latents else {}
        latent_net = {name: tensor for name, tensor in weights.items() if name.startswith("latent_net.")}
        self._identity = identity(self.workflow, tokenizer, {n.partition(".")[2]: x for n, x in latent_net.items()})
        options = cast(dict, args.gradient_checkpointing_kwargs or {})
        reentrant = args.gradient_checkpointing and options.get("use_reentrant")
        if settings.has_latents and reentrant:
            raise ValueError(
                "A team with latents does not support reentrant gradient checkpointing: all layers decode their cores from one "
                "latent. Set gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
        if args.ddp_find_unused_parameters is None:
            args.ddp_find_unused_parameters = False
        datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        examples = {name: self._examples(name, pairs) for name, pairs in datasets.items() if pairs is not None}
        if "train_dataset" not in examples:
            raise ValueError("train_dataset is None. Pass pairs, such as collect_preferences(team, problems) returns.")
        peft_config = PeftConfig.from_pretrained(str(self._start))
        peft_config.inference_mode = False
        self._team_settings = settings
        self._chosen_tokens: dict[str, float] = {}  # of a pair on average, in training and in evaluation
        super().__init__(
            model=saved.base_model,
            args=args,
            data_collator=EpisodeCollator(tokenizer.pad_token_id, settings.latent_size if settings.has_latents else 0),
            train_dataset=examples["train_dataset"],
            eval_dataset=examples.get("eval_dataset"),
            processing_class=tokenizer,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
        if args.disable_dropout:
            disable_dropout(self.model)
        checkpoint_without_reentry(args)
        warn_of_quantization(self._start, saved, self.model)
        self._window_means = WindowMeans()
        self._make_team(saved)
        self._warn_of_agents_alike(examples["train_dataset"])
        self.precompute_ref_logps = True  # not in `args`: TRL would run the reference before the team is loaded
        self.train_dataset = self._precompute_ref_logps(self.train_dataset, "train", args.per_device_train_batch_size)
        if self.eval_dataset is not None:
            self.eval_dataset = self._precompute_ref_logps(self.eval_dataset, "eval", args.per_device_eval_batch_size)

    # The team

    def _make_team(self, saved: TeamDescription) -> None:
        """Loads the weights of the saved team into the model, and the team's modules beside it."""
        with reading(f"{str(self._start)!r}", "Use the base model of its training."):
            check_base(saved, self.model)
        check_layers(self.model, self._start / ADAPTER_FILES[1])
        modules = load_modules(self._start, self.model, self._team_settings, self.agents)
        if modules is not None:
            adapter = next(p for p in self.model.parameters() if p.requires_grad)
            dtype = adapter.dtype if self.is_deepspeed_enabled else torch.promote_types(adapter.dtype, torch.float32)
            modules.to(device=self.accelerator.device, dtype=dtype)
            if modules.latent_net is not None:
                modules.latent_net.requires_grad_(False)
        self.team = Team(
            self.accelerator.unwrap_model(self.model),
            self._tokenizer,
            self.workflow,
            self._team_settings,
            dataclasses.replace(saved, trainer=type(self).__name__, dtype=dtype_of(self.model)),
            modules,
        )
        self._load_weights(self._start)

    def _load_weights(self, folder: Path) -> None:
        """Loads adapter and modules of a saved team into the model, also where ZeRO-3 shards them."""
        modules = self.team.modules
        adapter = [p for p in self.model.parameters() if p.requires_grad]
        with _whole([*adapter, *(modules.parameters() if modules is not None else ())]):
            set_peft_model_state_dict(self.model, load_file(folder / ADAPTER_FILES[1]))
            if modules is not None and (folder / MODULES_FILE).is_file():
                weights = load_file(folder / MODULES_FILE)
                modules.load_state_dict({name: weights[name] for name in modules.state_dict()})

    def _other_modules(self) -> dict[str, torch.Tensor]:
        """LatentNet, InferenceNet and a value head, which stay as they were."""
        if not (self._start / MODULES_FILE).is_file():
            return {}
        weights = load_file(self._start / MODULES_FILE)
        return {name: tensor for name, tensor in weights.items() if not name.startswith("core_decoder.")}

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict=state_dict)
        if self._team_settings.parameter_sharing == "separate":
            paths = [self._folder(output_dir) / "agents" / agent for agent in self.agents]
            save_adapters(self.model, split_adapter(self.model, len(paths), "auto"), paths, self.args.should_save)

    def _as_rows(self, agents: torch.Tensor, latents: torch.Tensor) -> AbstractContextManager[Any]:
        """Around a forward pass of rows of these agents `(R,)`, with these latents `(R, d)`."""
        modules = self.team.modules
        if modules is None:
            return nullcontext()
        if self._team_settings.has_latents:
            return modules.rows(ForwardContext(z=latents))
        return modules.rows(ForwardContext(agent=agents))

    def _first_problems(self, number: int) -> Iterable[Mapping[str, Any]]:
        return self._problems[:number]

    def _warn_of_agents_alike(self, examples: Dataset) -> None:
        if not self._team_settings.has_latents or len(self.agents) < 2:
            return
        sums = torch.zeros(len(self.agents), self._team_settings.latent_size)
        for rows in examples["chosen_rows"]:
            for row in rows:
                sums[row["agent"]] += torch.tensor(row["latent"])
        directions = torch.nn.functional.normalize(sums, dim=1)
        for i in range(len(self.agents)):
            for j in range(i):
                distance = 1 - float(directions[i] @ directions[j])
                if distance < ALIKE:
                    warnings.warn(
                        f"The latents of {self.agents[j]!r} and {self.agents[i]!r} are alike (cosine distance {distance:.3f}), so "
                        "the core decoder hardly tells these agents apart. Train the team's latents with SHPPOTrainer first, or "
                        "use parameter_sharing='shared'.",
                        stacklevel=3,
                    )

    # Data

    def _examples(self, name: str, pairs: Dataset) -> Dataset:
        """Examples of pairs; refuses datasets that leave none, and says how many pairs were dropped."""
        if not isinstance(pairs, Dataset) or "chosen_agent_scores" not in pairs.column_names:
            raise ValueError(f"{name} does not hold pairs of episodes. Pass what collect_preferences returns.")
        if len(pairs) == 0:
            raise ValueError(
                f"{name} has no pairs: all returns were equal. Collect more candidates per problem, or use a finer reward."
            )
        check_identity(name, pairs, self._identity)
        args = self.args
        alone = set(args.loss_type) <= set(DIFFERENCES) and args.f_divergence_type == "reverse_kl"
        examples, too_long = make_examples(pairs, self.agents, args.margin, args.gamma_turn, args.max_length, alone)
        said = (
            f"{too_long} of {len(pairs)} pairs of {name} have a row of more than max_length={args.max_length} tokens"
        )
        if too_long == len(pairs):
            raise ValueError(f"{said}. Set a larger max_length.")
        if len(examples) == 0:
            raise ValueError(
                f"{name} has no pair with replies that differ in a way that margin={args.margin!r} can learn from. Set margin='joint'."
            )
        if too_long and args.process_index == 0:
            warnings.warn(f"{said} and are dropped.", stacklevel=3)
        return examples

    def _prepare_dataset(self, dataset, processing_class, args, dataset_name):
        # Without super(): TRL's encodes texts, whatever the dataset has, and replies are the tokens that were generated.
        # SFTTrainer's `dataset_kwargs={"skip_prepare_dataset": True}`, in DPOConfig, would replace this method
        if "chosen_rows" in dataset.column_names:
            return dataset
        return self._examples(dataset_name, dataset)

    def _set_signature_columns_if_needed(self):
        super()._set_signature_columns_if_needed()
        ours = ("chosen_rows", "rejected_rows", "ref_chosen_row_logps", "ref_rejected_row_logps")
        self._signature_columns += [name for name in ours if name not in self._signature_columns]

    # Reference

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        """Adds the log-probabilities of the reference, of every side and of every row, weighted like the policy's."""
        # Without super(): TRL's gives the values to the other processes through a cache file, and a dataset in memory has
        # one for each process. It also keeps no rows
        if self.state.global_step > 0 and self.args.reference != "none":
            raise ValueError("The reference is gone once training began. Pass eval_dataset to the constructor.")
        tokens = sum(len(row["ids"]) - row["prompt_length"] for rows in dataset["chosen_rows"] for row in rows)
        self._chosen_tokens["train" if name == "train" else "eval"] = tokens / len(dataset)
        sizes = [len(rows) for side in ("chosen_rows", "rejected_rows") for rows in dataset[side]]
        self.data_collator.num_rows = max(self.data_collator.num_rows, *sizes)
        size = self.args.precompute_ref_batch_size or batch_size
        loader = self.accelerator.prepare(DataLoader(dataset, batch_size=size, collate_fn=self.data_collator))
        found: list[list[torch.Tensor]] = []
        with self._reference_model() as model:
            for batch in tqdm(loader, desc=f"Reference of the {name} pairs", disable=self.args.disable_tqdm):
                rows = _take_rows(batch)
                if model is None:
                    zeros = torch.zeros_like(rows["row_weights"])
                    sides, of_rows = zeros.sum(1).chunk(2), zeros
                else:
                    episodes = self._episodes(model, rows)
                    sides = super().compute_ref_log_probs(episodes, batch)
                    of_rows = episodes.row_logps
                found.append([x.cpu() for x in self.accelerator.gather_for_metrics((*sides, *of_rows.chunk(2)))])
        columns = ("ref_chosen_logps", "ref_rejected_logps", "ref_chosen_row_logps", "ref_rejected_row_logps")
        for column, values in zip(columns, zip(*found, strict=True), strict=True):
            dataset = dataset.add_column(column, torch.cat(values).tolist())
        return dataset

    @contextmanager
    def _reference_model(self) -> Iterator[Any]:
        """The model with the weights of the reference; `None` where there is no reference."""
        if self.args.reference == "none":
            yield None
            return
        if self._reference != self._start:
            self._load_weights(self._reference)
        deepspeed = self.is_deepspeed_enabled
        # TRL would disable the adapter, unless there is a reference model: it is the model itself, before it is trained
        self.ref_model = (
            prepare_deepspeed(self.model, self.accelerator) if deepspeed else self.model.to(self.accelerator.device)
        )
        training = self.model.training
        self.model.eval()
        try:
            yield self.ref_model
        finally:
            self.ref_model = None
            self.model.train(training)
            if self._reference != self._start:
                self._load_weights(self._start)

    # Loss

    def _episodes(self, model: Any, rows: Mapping[str, torch.Tensor]) -> EpisodeModel:
        decoder = self.team.model.get_base_model().get_decoder()
        return EpisodeModel(model, decoder, rows, self._as_rows, self._tokenizer.pad_token_id)

    def _compute_loss(self, model, inputs, return_outputs):
        rows = _take_rows(inputs)
        episodes = self._episodes(model, rows)
        mask = inputs["completion_mask"]
        with lent(self, **self._weighed_by_tokens(mask)):
            loss = super()._compute_loss(episodes, inputs, return_outputs)
        self._log_agents(rows, episodes.row_logps)
        self._pool_token_means(mask)
        return loss

    def _weighed_by_tokens(self, mask: torch.Tensor) -> dict[str, list]:
        """
        Returns the loss types and weights for TRL's loss of a micro-batch with this mask, `(2B, L)`. Its `"sft"` is a mean over the
        chosen tokens of the micro-batch: weighed by their number over that of such a micro-batch on average, so that the loss does
        not depend on how pairs are split.
        """
        if "sft" not in self.loss_types:
            return {}
        tokens = mask.chunk(2)[0].sum().item()
        share = tokens and tokens / (len(mask) / 2 * self._chosen_tokens[self._mode])
        # The mean over no tokens is NaN, also with a weight of 0
        types = ["sigmoid" if name == "sft" and not tokens else name for name in self.loss_types]
        weights = zip(self.loss_types, self.loss_weights, strict=True)
        return {"loss_types": types, "loss_weights": [w * share if name == "sft" else w for name, w in weights]}

    # Log

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _pool_token_means(self, mask: torch.Tensor) -> None:
        """Takes TRL's means over the tokens of a micro-batch, `(2B, L)`, and weighs them by the number of tokens."""
        chosen, rejected = (side.sum() for side in mask.chunk(2))
        counts = {"entropy": chosen + rejected, "logits/chosen": chosen, "logits/rejected": rejected}
        for name, count in (counts | {"mean_token_accuracy": chosen}).items():
            [mean] = self._metrics[self._mode].pop(name)
            self._window_means.add(self._mode, name, mean * count, count)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        for name, mean in self._window_means.take(self._mode).items():
            self._metrics[self._mode][name].append(mean)
        super().log(logs, start_time)

    @torch.no_grad()
    def _log_agents(self, rows: Mapping[str, torch.Tensor], row_logps: torch.Tensor) -> None:
        """Adds the margin of every agent: β times its part of ρ(chosen) − ρ(rejected), over the pairs in which it speaks."""
        present = rows["row_lengths"] > 0
        own = torch.nn.functional.one_hot(rows["row_agents"], len(self.agents)) * present[..., None]
        ratios = ((row_logps - rows["ref_row_logps"])[..., None] * own).sum(1)  # (2B, N)
        chosen, rejected = ratios.chunk(2)
        speaks = own.any(1).view(2, -1, len(self.agents)).any(0)
        margins = (self.beta * (chosen - rejected) * speaks).sum(0)
        for agent, margin, count in zip(self.agents, margins, speaks.sum(0), strict=True):
            self._window_means.add(self._mode, f"agents/{agent}/margin", margin, count)


def _take_rows(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Takes out of a batch what the language model does not know."""
    return {name: inputs.pop(name) for name in ROW_KEYS if name in inputs}


@contextmanager
def _whole(parameters: list[torch.nn.Parameter]) -> Iterator[None]:
    """Around a change of weights: all processes make it, and ZeRO-3 shards the result."""
    if not is_deepspeed_zero3_enabled():
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
        yield


def _prompts_of(pairs: Dataset | None) -> list[dict[str, Any]]:
    """The problems of pairs, as far as they are known."""
    if pairs is None or "prompt" not in pairs.column_names:
        return []
    return [{"prompt": prompt} for prompt in {repr(prompt): prompt for prompt in pairs["prompt"]}.values()]
