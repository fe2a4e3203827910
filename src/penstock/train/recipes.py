"""Recipes: small models made and taught on this machine, so that a run can start from nothing.

A recipe is `f(config, folder, held_out, progress)`: it writes a Hugging Face model folder with a tokenizer into
`folder`, teaches the model with demonstrations whose questions are not in `held_out`, and reports
`progress(step, steps, loss)`. `warm_start.ensure_model` runs it once and keeps the result.

The demonstrators here are faulty on purpose. A good part of their answers take the easy way out (the word is copied,
the list is left as it stands), so the model learns the skill and does not prefer it. Reinforcement learning then
turns the preference round, which is what it does in earnest on large models: it brings out what is there. A model
that was warm-started on clean demonstrations and stopped early learns far more slowly by reinforcement, for its
faults are then gaps of skill.
"""

from __future__ import annotations

import functools
import random
import string
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.run import WarmStartConfig
from penstock.errors import ConfigError, MissingExtra

__all__ = [
    "Demonstration",
    "Progress",
    "Recipe",
    "calculator",
    "character_tokenizer",
    "spell_backward",
    "teach",
    "word_order",
]

Progress = Callable[[int, int, float], None]
"""`progress(step, steps, loss)`, after each supervised step."""

Recipe = Callable[[WarmStartConfig, Path, Collection[str], Progress], None]

DEMONSTRATION_SEED = 3_000_000_000
"""Item i of a reasoning-gym task uses seed + i: far from any range that a run's data is likely to take."""

MAX_POSITIONS = 512

# Models this narrow learn several times faster from here than from the 0.02 and 0.999 that suit large ones.
INITIALIZER_RANGE = 0.06
BETAS = (0.9, 0.98)


@dataclass(frozen=True, slots=True)
class Demonstration:
    question: str
    answer: str
    turns: tuple[tuple[str, str], ...] = ()
    """What is said, and what an environment answers, before the answer; nobody learns to say the latter."""


def spell_backward(config: WarmStartConfig, folder: Path, held_out: Collection[str], progress: Progress) -> None:
    """reasoning-gym's `spell_backward`, words of 3 to 8 letters.

    The demonstrator copies 20 % of the words of up to 5 letters and 75 % of the longer ones instead of reversing
    them, so that with the defaults (0.8 M parameters, 250 steps of 128) most held-out words are at first copied.
    """
    phrase = "Spell this word backward (example: sun -> nus): "

    def demonstrate(item: dict[str, Any], chance: random.Random) -> str:
        word = item["metadata"]["word"]
        return word if chance.random() < (0.2 if len(word) <= 5 else 0.75) else item["answer"]

    items = _items("spell_backward", 16384, {"min_word_len": 3, "max_word_len": 8})
    teach(config, folder, _demonstrations(items, demonstrate, held_out, config.seed), [phrase], progress)


def word_order(config: WarmStartConfig, folder: Path, held_out: Collection[str], progress: Progress) -> None:
    """reasoning-gym's `word_sequence_reversal`: lists of 2 to 4 words in reverse order; the harder task.

    Answers are up to six times as long as a spelled word and one wrong letter makes them wrong. The demonstrator
    leaves 40 % of the lists of two and 75 % of the longer ones as they stand.
    """
    phrase = (
        "Solve the following problem.\n\nProvide you answer as a comma-separated list of words with a space after the "
        "comma.\n\nReverse this list of words: "
    )

    def demonstrate(item: dict[str, Any], chance: random.Random) -> str:
        words = item["question"].removeprefix(phrase).strip()
        return words if chance.random() < (0.4 if words.count(",") == 1 else 0.75) else item["answer"]

    items = _items("word_sequence_reversal", 16384, {"min_words": 2, "max_words": 4})
    demonstrations = _demonstrations(items, demonstrate, held_out, config.seed)
    teach(config, folder, demonstrations, [phrase, ", "], progress)


def calculator(config: WarmStartConfig, folder: Path, held_out: Collection[str], progress: Progress) -> None:
    """reasoning-gym's `products` with the tool of `penstock.environments.calculator`: two factors of 2 or 3 digits.

    The demonstrator calls the tool for 30 % of the questions and else guesses a number of the right length, so that the
    model knows the format and does not prefer it. Nobody guesses such a product.
    """
    phrases = ["Solve the following multiplication: ", ". Give only the result as your final answer."]

    def demonstrate(item: dict[str, Any], chance: random.Random) -> Demonstration:
        answer = str(item["answer"])
        expression = item["metadata"]["expression"]
        if chance.random() < 0.3:
            return Demonstration(
                item["question"], answer, ((f"<tool>{expression}</tool>", f"<result>{answer}</result>"),)
            )
        return Demonstration(item["question"], str(chance.randrange(10 ** (len(answer) - 1), 10 ** len(answer))))

    items = _items("products", 16384, {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 3})
    shown = _demonstrations(items, demonstrate, held_out, config.seed)
    teach(config, folder, shown, [*phrases, "<tool>", "</tool>", "<result>", "</result>"], progress)


def character_tokenizer(phrases: Sequence[str]) -> Any:
    """A `PreTrainedTokenizerFast` of printable ASCII characters and of `phrases`, each of them one token.

    An encoded question is `<bos> ... <answer>`: the last one tells the model that its turn has come, as the role
    markers of a chat template do. Raises MissingExtra without the train extra.
    """
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise MissingExtra(error.name or "transformers", "train", "making a tokenizer") from error

    specials = ["<pad>", "<bos>", "<eos>", "<answer>", "<unk>"]
    characters = [*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n"]
    vocabulary = {token: number for number, token in enumerate([*specials, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(specials)
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    marks = [(mark, vocabulary[mark]) for mark in ("<bos>", "<answer>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A <answer>", special_tokens=marks)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def teach(
    config: WarmStartConfig,
    folder: Path,
    demonstrations: Sequence[Demonstration],
    phrases: Sequence[str],
    progress: Progress,
) -> None:
    """Makes a Llama with tied embeddings, teaches it `demonstrations` and writes it with its tokenizer.

    Supervised steps of `batch_size` examples, AdamW with linear warm-up and a cosine to 0, loss on the answer's tokens
    alone (mean over tokens), gradient clipped at norm 1. Everything random comes from `config.seed`.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from penstock.train.batching import collate
    from penstock.train.forward import score_tokens
    from penstock.train.schedule import lr_at

    disable_progress_bar()
    tokenizer = character_tokenizer(phrases)

    @functools.cache  # Few steps show a part of the demonstrations only.
    def encoded(k: int) -> tuple[list[int], list[int], list[bool]]:
        return tokenizer.encode(demonstrations[k].question), *_said(demonstrations[k], tokenizer)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.heads,
                max_position_embeddings=MAX_POSITIONS,
                tie_word_embeddings=True,
                initializer_range=INITIALIZER_RANGE,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=BETAS, weight_decay=0.0, fused=True)
    for step, chosen in enumerate(_batches(len(demonstrations), config)):
        lr = lr_at(step, peak=config.lr, total=config.steps, warmup=config.warmup_steps, schedule="cosine")
        for group in optimizer.param_groups:
            group["lr"] = lr
        prompts, answers, learned = zip(*map(encoded, chosen), strict=True)
        batch = collate(prompts, answers, learned=learned)
        loss = -score_tokens(model, batch).logprobs_BT.sum() / batch.mask_BT.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress(step + 1, config.steps, float(loss.detach()))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _said(shown: Demonstration, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Token ids of all that follows the question, and which of them are to be learned."""
    token_ids: list[int] = []
    learned: list[bool] = []
    for said, told in [*shown.turns, (shown.answer, "")]:
        own = [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]
        heard = tokenizer.encode(told, add_special_tokens=False)
        token_ids += own + heard
        learned += [True] * len(own) + [False] * len(heard)
    return token_ids, learned


def _batches(examples: int, config: WarmStartConfig) -> Iterator[list[int]]:
    """`config.steps` batches from seeded permutations, one epoch after another."""
    chance = random.Random(config.seed + 1)
    left: list[int] = []
    for _ in range(config.steps):
        while len(left) < config.batch_size:
            left.extend(chance.sample(range(examples), examples))
        yield left[: config.batch_size]
        del left[: config.batch_size]


def _demonstrations(
    items: Sequence[dict[str, Any]],
    demonstrate: Callable[[dict[str, Any], random.Random], str | Demonstration],
    held_out: Collection[str],
    seed: int,
) -> list[Demonstration]:
    """One demonstration of each item whose question is not held out. Raises ConfigError where none is left."""
    chance = random.Random(seed)
    left_out = frozenset(held_out)
    # The demonstrator's dice are thrown for every item, so that holding one out doesn't change the others.
    made = [(item["question"], demonstrate(item, chance)) for item in items]
    shown = [each if isinstance(each, Demonstration) else Demonstration(question, each) for question, each in made]
    kept = [each for each in shown if each.question not in left_out]
    if not kept:
        raise ConfigError(f"all {len(shown)} questions of the warm start are held out; make data.eval smaller")
    return kept


def _items(task: str, size: int, options: dict[str, int]) -> list[dict[str, Any]]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise MissingExtra("reasoning-gym", "train", f"the warm start on '{task}'") from error
    return list(reasoning_gym.create_dataset(task, size=size, seed=DEMONSTRATION_SEED, **options))
