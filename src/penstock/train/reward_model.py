"""A reward model as a worker: rows of text in, a value or a cause for each out.

Decides how texts become tokens and passes, and which of the model's numbers is the value. Refuses to know who calls,
what a sample is, or what became of its siblings (`reward.worker_scorer`, `cluster`). A row that can't be scored has a
cause and no value; the others keep theirs.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any

from penstock.cluster import Batch, Cluster, WorkerGroup, dispatch, from_tensors
from penstock.cluster.column import text_column
from penstock.config.reward_model import RewardModelConfig
from penstock.errors import ConfigError, MissingExtra

__all__ = ["RewardModel", "micro_batches", "open_reward_model"]

NAME = "reward-model"


def open_reward_model(cluster: Cluster, config: RewardModelConfig, on_ray: bool) -> WorkerGroup:
    """The model's workers, as one group; calls on it are launched as the run's `cluster` says.

    Raises WorkerFailed where the model can't be loaded, MissingExtra without Ray.
    """
    kept = ("path", "kind", "label", "yes", "no", "device", "dtype", "tokens_per_micro_batch")
    arguments = config.model_dump(include=set(kept))
    if on_ray:
        gpus = config.gpus_per_worker
        return cluster.group(cluster.ray(RewardModel, config.workers, gpus=gpus, arguments=arguments, name=NAME))
    return cluster.group(cluster.local(RewardModel, config.workers, arguments=arguments, name=NAME))


class RewardModel:
    """One worker's copy of the model."""

    def __init__(
        self,
        path: str,
        kind: str = "classifier",
        label: int | None = None,
        yes: str = "Yes",
        no: str = "No",
        device: str = "auto",
        dtype: str = "auto",
        tokens_per_micro_batch: int = 16384,
    ) -> None:
        """Arguments as in `RewardModelConfig`. Raises ConfigError, and what transformers raises for the folder."""
        try:
            import torch
            from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
        except ImportError as error:
            raise MissingExtra(error.name or "transformers", "train", "a reward model") from error

        # Workers of one machine share its cores.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("WORLD_SIZE", "1"))))
        self._tokens_per_micro_batch = tokens_per_micro_batch
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        kinds: dict[str, Any] = {"classifier": AutoModelForSequenceClassification, "yes_token": AutoModelForCausalLM}
        model = kinds[kind].from_pretrained(path, dtype=dtype)
        self._model: Any = model.to(_device(device)).eval()
        self._kind = kind
        if kind == "classifier":
            self._label = _label(label, int(self._model.config.num_labels))
        else:
            self._yes_no = [self._one_token(word) for word in (yes, no)]
            self._keeps = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        self._positions = getattr(self._model.config, "max_position_embeddings", None)

    @dispatch("data_parallel", tokens="length")
    def score(self, batch: Batch) -> Batch:
        """`text` -> `value` (float64) and `cause` (empty where there is a value), row by row."""
        import torch

        rows: list[list[int]] = [self._tokenizer(text)["input_ids"] for text in batch.values("text")]
        values, causes = [0.0] * len(rows), [self._refusal(row) for row in rows]
        for chosen in micro_batches(
            [0 if causes[k] else len(row) for k, row in enumerate(rows)], self._tokens_per_micro_batch
        ):
            try:
                with torch.inference_mode():
                    found = self._values([rows[k] for k in chosen])
            except RuntimeError as error:  # a device's memory, mostly: these rows' cause, and no reason to end
                for k in chosen:
                    causes[k] = f"{type(error).__name__}: {error}"
                continue
            for k, value in zip(chosen, found, strict=True):
                values[k] = value
        told = from_tensors({"value": torch.tensor(values, dtype=torch.float64)})
        return Batch({**told.columns, "cause": text_column(causes)})

    def _refusal(self, row: Sequence[int]) -> str:
        if not row:
            return "the text has no tokens"
        if isinstance(self._positions, int) and len(row) > self._positions:
            return f"the text has {len(row)} tokens, over the model's {self._positions} positions"
        return ""

    def _values(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """One number a row of token ids, of rows that are padded to the longest on the right."""
        import torch

        lengths = [len(row) for row in rows]
        pad = self._pad_id(rows)
        ids_BT = torch.full((len(rows), max(lengths)), pad)
        mask_BT = torch.zeros_like(ids_BT)
        for k, row in enumerate(rows):
            ids_BT[k, : len(row)] = torch.tensor(row)
            mask_BT[k, : len(row)] = 1
        inputs = {"input_ids": ids_BT.to(self._model.device), "attention_mask": mask_BT.to(self._model.device)}
        if self._kind == "classifier":
            self._model.config.pad_token_id = pad  # by which the model finds each row's last token
            found: list[float] = self._model(**inputs).logits[:, self._label].double().tolist()
            return found
        return self._yes_shares(inputs, lengths)

    def _yes_shares(self, inputs: dict[str, Any], lengths: Sequence[int]) -> list[float]:
        """Probability of `yes` over that of `yes` or `no`, after each row's last token."""
        import torch

        ends = sorted({length - 1 for length in lengths})
        at = {position: k for k, position in enumerate(ends)}
        if self._keeps:
            keep = torch.tensor(ends, device=self._model.device)
            logits_BEV = self._model(**inputs, logits_to_keep=keep).logits
        else:
            logits_BEV = self._model(**inputs).logits[:, ends]
        places = torch.tensor([at[length - 1] for length in lengths], device=logits_BEV.device)
        last_BV = logits_BEV[torch.arange(len(lengths), device=logits_BEV.device), places].double()
        yes, no = self._yes_no
        shares: list[float] = torch.sigmoid(last_BV[:, yes] - last_BV[:, no]).tolist()
        return shares

    def _pad_id(self, rows: Sequence[Sequence[int]]) -> int:
        """An id that no row has, unless the tokenizer has one for nothing else: rows may end with their end token."""
        tokenizer = self._tokenizer
        if tokenizer.pad_token_id is not None and tokenizer.pad_token_id != tokenizer.eos_token_id:
            return int(tokenizer.pad_token_id)
        used = {token for row in rows for token in row}
        return next((k for k in range(int(self._model.config.vocab_size)) if k not in used), 0)

    def _one_token(self, word: str) -> int:
        ids = self._tokenizer(word, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise ConfigError(f"reward.model: '{word}' is {len(ids)} tokens of this model; yes and no must be one each")
        return int(ids[0])


def micro_batches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Rows (0-based) that go through the model together: at most `tokens` with padding, or one row that is longer.

    Rows of length 0 are left out. Neighbours in length go together, the longest first.
    """
    found: list[list[int]] = []
    longest = 0
    for row in sorted((k for k, length in enumerate(lengths) if length), key=lambda k: -lengths[k]):
        if not found or (len(found[-1]) + 1) * longest > tokens:
            found.append([])
            longest = lengths[row]
        found[-1].append(row)
    return found


def _label(label: int | None, labels: int) -> int:
    if label is None and labels != 1:
        raise ConfigError(f"the classifier has {labels} labels; say with reward.model.label which one is the reward")
    if label is not None and label >= labels:
        raise ConfigError(f"reward.model.label = {label}, and the classifier has {labels} labels")
    return label or 0


def _device(name: str) -> str:
    import torch

    if name != "auto":
        return name
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{int(os.environ.get('RANK', '0')) % torch.cuda.device_count()}"
