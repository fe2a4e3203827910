from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import written

from penstock.config.train import TrainConfig
from penstock.errors import CheckpointError, ConfigError
from penstock.train.actor import Actor, pick_device
from penstock.train.batching import PassBatch, collate, split_passes
from penstock.train.forward import score_tokens
from penstock.train.loading import load_causal_lm
from penstock.train.losses import aggregate, approximate_kl
from penstock.train.policy_losses import ppo_clip

AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


PLACE = {"device": "cpu"}


@pytest.fixture(
    autouse=True,
    params=[
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")),
    ],
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where every actor of these tests lives; what they compare it with is computed on the CPU."""
    monkeypatch.setitem(PLACE, "device", request.param)
    return torch.device(request.param)


def make_actor(folder: Path, dtype: str = "float32", **train: Any) -> Actor:
    config = TrainConfig.model_validate({"lr": 1e-3, **PLACE, **train})
    return Actor(folder, config, total_optimizer_steps=10, horizon_tokens=16, dtype=dtype)


def make_samples(count: int = 12) -> tuple[list[list[int]], list[list[int]], list[list[float]], list[float]]:
    generator = torch.Generator().manual_seed(1)

    def numbers(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    prompts = [numbers(5, 90, size) for size in numbers(1, 9, count)]
    outputs = [numbers(5, 90, size) for size in numbers(1, 12, count)]
    logprobs = [[-4.0 - 0.1 * (k % 5) for k in range(len(output))] for output in outputs]
    advantages = torch.randn(count, generator=generator).tolist()
    return prompts, outputs, logprobs, advantages


def passes_of(budget: int) -> list[PassBatch]:
    prompts, outputs, logprobs, advantages = make_samples()
    lengths = [len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)]
    columns = (prompts, outputs, logprobs, advantages)
    return [collate(*([column[k] for k in rows] for column in columns)) for rows in split_passes(lengths, budget)]  # type: ignore[arg-type]


def gradients(actor: Actor, budget: int) -> list[torch.Tensor]:
    actor.begin_step()
    for batch in passes_of(budget):
        actor.accumulate(batch)
    denominator = actor.mini_batch.denominator
    assert denominator is not None
    return [(parameter.grad / denominator).cpu() for parameter in actor.model.parameters()]


def assert_same_gradient(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Equal to float noise: their difference is a millionth or so of their length."""
    apart = [one - other for one, other in zip(found, expected, strict=True)]
    share = torch.nn.utils.get_total_norm(apart) / torch.nn.utils.get_total_norm(expected)
    assert float(share) < 1e-5


def test_logprobs_and_entropy_are_those_of_the_plain_forward_pass(model_folder: Path) -> None:
    model = load_causal_lm(model_folder)
    prompts, outputs, _, _ = make_samples()
    scores = score_tokens(model, collate(prompts, outputs))
    for k, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        logits_TV = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        logprobs_TV = logits_TV.log_softmax(-1)
        expected_T = logprobs_TV[range(len(output)), output]
        torch.testing.assert_close(scores.logprobs_BT[k, : len(output)], expected_T, atol=2e-5, rtol=1e-5)
        entropy_T = torch.distributions.Categorical(logits=logits_TV).entropy()
        torch.testing.assert_close(scores.entropy_BT[k, : len(output)], entropy_T, atol=2e-5, rtol=1e-5)
        assert scores.logprobs_BT[k, len(output) :].eq(0).all()


def test_at_a_temperature_scores_are_those_of_the_scaled_logits_and_the_engines_stay_at_one(
    model_folder: Path,
) -> None:
    model = load_causal_lm(model_folder)
    prompts, outputs, _, _ = make_samples()
    scores = score_tokens(model, collate(prompts, outputs), temperature=0.7)
    for k, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        logits_TV = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        at = range(len(output)), output
        for found_BT, expected_T in (
            (scores.logprobs_BT, (logits_TV / 0.7).log_softmax(-1)[at]),
            (scores.model_logprobs_BT, logits_TV.log_softmax(-1)[at]),
            (scores.entropy_BT, torch.distributions.Categorical(logits=logits_TV / 0.7).entropy()),
        ):
            torch.testing.assert_close(found_BT[k, : len(output)], expected_T, atol=2e-5, rtol=1e-5)
    assert not scores.model_logprobs_BT.requires_grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_logits_give_the_same_values_and_gradients(model_folder: Path, temperature: float) -> None:
    model = load_causal_lm(model_folder)
    prompts, outputs, _, _ = make_samples()
    found = []
    for max_logits in (2**27, 7 * 101):
        model.zero_grad()
        scores = score_tokens(
            model, collate(prompts, outputs), temperature=temperature, entropy_gradient=True, max_logits=max_logits
        )
        (scores.logprobs_BT.sum() + scores.entropy_BT.sum()).backward()
        found.append([*scores, *(parameter.grad.clone() for parameter in model.parameters())])
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_is_the_same_in_one_pass_and_in_many(model_folder: Path, aggregation: str) -> None:
    options = {"aggregation": aggregation, "kl_coef": 0.1, "entropy_coef": 0.01}
    actor = make_actor(model_folder, **options)
    with torch.no_grad():
        for parameter in actor.model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    assert len(passes_of(10_000)) == 1 < len(passes_of(40)) < len(passes_of(1)) == 12
    whole = gradients(actor, 10_000)
    for budget in (40, 1):
        assert_same_gradient(gradients(actor, budget), whole)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_is_that_of_the_written_out_loss(model_folder: Path, aggregation: str) -> None:
    options = {"aggregation": aggregation, "kl_coef": 0.5, "entropy_coef": 0.02, "clip_low": 0.1, "clip_high": 0.3}
    actor = make_actor(model_folder, **options)
    reference = load_causal_lm(model_folder).to(actor.device)
    with torch.no_grad():
        for parameter in actor.model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    found = gradients(actor, 40)
    actor.model.zero_grad()
    batch = passes_of(10_000)[0].to(actor.device)
    scores = score_tokens(actor.model, batch, entropy_gradient=True)
    clip = ppo_clip(scores.logprobs_BT, batch.rollout_logprobs_BT, batch.advantages_BT, 0.1, 0.3)
    kl = approximate_kl(scores.logprobs_BT, score_tokens(reference, batch).logprobs_BT, "k3")
    loss = clip.loss_BT + 0.5 * kl - 0.02 * scores.entropy_BT
    aggregate(loss, batch.mask_BT, aggregation, horizon_tokens=16).backward()  # type: ignore[arg-type]
    expected = [parameter.grad.cpu() for parameter in actor.model.parameters()]
    assert_same_gradient(found, expected)


def test_the_gradient_at_a_temperature_is_that_of_the_distribution_that_drew(model_folder: Path) -> None:
    """One optimizer step in, so that old, new and reference weights differ; everything written out, token by token."""
    options = {"kl_coef": 0.3, "kl_estimator": "k2", "entropy_coef": 0.05, "mini_batches_per_step": 2}
    actor = make_actor(model_folder, lr=2e-3, **options)
    prompts, outputs, logprobs, advantages = make_samples(5)
    batch = collate(prompts, outputs, logprobs, advantages)
    old = load_causal_lm(model_folder).to(actor.device)
    actor.begin_step(temperature=0.7)
    actor.accumulate(batch)
    assert actor.optimizer_step(0).applied
    actor.accumulate(batch)
    found = [parameter.grad / actor.mini_batch.denominator for parameter in actor.model.parameters()]

    actor.model.zero_grad()
    total, tokens = torch.zeros((), device=actor.device), 0
    for prompt, output, advantage in zip(prompts, outputs, advantages, strict=True):
        ids = torch.tensor([prompt + output], device=actor.device)
        for n, token in enumerate(output):
            new_V, old_V = (
                (model(ids).logits[0, len(prompt) - 1 + n] / 0.7).log_softmax(-1) for model in (actor.model, old)
            )
            ratio = (new_V[token] - old_V[token].detach()).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            kl = 0.5 * (new_V[token] - old_V[token].detach()) ** 2
            entropy = -(new_V.exp() * new_V).sum()
            total = total - surrogate + 0.3 * kl - 0.05 * entropy
            tokens += 1
    (total / tokens).backward()
    assert_same_gradient(found, [parameter.grad for parameter in actor.model.parameters()])


def test_the_gap_to_the_rollout_compares_what_engines_report_at_any_temperature(model_folder: Path) -> None:
    gaps = {}
    for temperature in (1.0, 0.5):
        actor = make_actor(model_folder)
        prompts, outputs, _, advantages = make_samples()
        columns = actor.logprobs(collate(prompts, outputs)).tolist()
        reported = [column[: len(output)] for column, output in zip(columns, outputs, strict=True)]
        actor.begin_step(temperature)
        actor.accumulate(collate(prompts, outputs, reported, advantages))
        gaps[temperature] = actor.sums.means()["rollout_logprob_gap"]
    assert max(gaps.values()) < 1e-5


def test_the_engines_logprobs_are_the_ratios_denominator_at_temperature_one_alone(model_folder: Path) -> None:
    automatic = make_actor(model_folder)
    assert abs(old_ratio(automatic, 0) - 1) > 1e-2
    assert old_ratio(automatic, 0, temperature=0.7) == 1.0
    with pytest.raises(ConfigError, match=r'train.old_logprobs="rollout" .*temperature=0.7.*"recompute"'):
        make_actor(model_folder, old_logprobs="rollout").begin_step(0.7)
    with pytest.raises(ConfigError, match="greedy"):
        automatic.begin_step(0.0)


def test_an_optimizer_step_makes_good_samples_likelier(model_folder: Path) -> None:
    actor = make_actor(model_folder, old_logprobs="recompute")
    prompts, outputs, logprobs, _ = make_samples(4)
    batch = collate(prompts, outputs, logprobs, [1.0, 1.0, -1.0, -1.0])
    before = actor.logprobs(batch).sum(dim=1)
    actor.begin_step()
    actor.accumulate(batch)
    done = actor.optimizer_step(0)
    assert done.applied
    assert done.grad_norm > 0
    assert done.lr == 1e-3
    change = (actor.logprobs(batch).sum(dim=1) - before).tolist()
    assert min(change[:2]) > 0 > max(change[2:])


def test_the_gradient_is_clipped_at_its_norm(model_folder: Path) -> None:
    # With SGD-like first moments out of the way: Adam's first moment after one step is (1 - beta1) x gradient.
    actor = make_actor(model_folder, max_grad_norm=0.01)
    actor.begin_step()
    actor.accumulate(passes_of(10_000)[0])
    done = actor.optimizer_step(0)
    moments = [actor.optimizer.state[parameter]["exp_avg"] / 0.1 for parameter in actor.model.parameters()]
    assert done.grad_norm > 0.01
    assert float(torch.nn.utils.get_total_norm(moments)) == pytest.approx(0.01, rel=1e-3)


def test_a_non_finite_gradient_changes_nothing_and_is_counted(model_folder: Path) -> None:
    actor = make_actor(model_folder)
    prompts, outputs, logprobs, advantages = make_samples(4)
    kept = {name: tensor.clone() for name, tensor in actor.named_weights()}
    actor.begin_step()
    actor.accumulate(collate(prompts, outputs, logprobs, [math.nan, *advantages[1:]]))
    done = actor.optimizer_step(0)
    assert not done.applied
    assert "nan" in done.cause
    assert actor.steps_skipped == 1
    assert not actor.optimizer.state
    for name, tensor in actor.named_weights():
        assert torch.equal(tensor, kept[name])
    # And the next mini-batch starts from nothing.
    actor.accumulate(collate(prompts, outputs, logprobs, advantages))
    assert actor.optimizer_step(1).applied


def test_a_mini_batch_without_passes_changes_nothing(model_folder: Path) -> None:
    actor = make_actor(model_folder)
    actor.begin_step()
    done = actor.optimizer_step(0)
    assert not done.applied
    assert "signal" in done.cause
    assert actor.steps_skipped == 0


def old_ratio(actor: Actor, moves: int, temperature: float = 1.0) -> float:
    """Mean ratio of one more pass after `moves` optimizer steps within the step."""
    batch = passes_of(10_000)[0]
    actor.begin_step(temperature)
    for position in range(moves):
        actor.accumulate(batch)
        actor.optimizer_step(position)
    actor.sums.means()
    actor.accumulate(batch)
    return actor.sums.means()["ratio"]


def test_old_logprobs_come_from_the_rollout_or_from_the_steps_first_weights(model_folder: Path) -> None:
    assert abs(old_ratio(make_actor(model_folder, old_logprobs="rollout"), 0) - 1) > 1e-2
    recompute = {"old_logprobs": "recompute", "mini_batches_per_step": 2}
    assert old_ratio(make_actor(model_folder, **recompute), 0) == 1.0
    actor = make_actor(model_folder, **recompute)
    moved = old_ratio(actor, 1)
    assert abs(moved - 1) > 1e-4
    # The next step starts from its own first weights.
    assert old_ratio(actor, 0) == 1.0


def test_the_reference_is_made_only_where_it_is_used(model_folder: Path) -> None:
    assert make_actor(model_folder).reference is None
    assert make_actor(model_folder, kl_coef=0.1).reference is not None


def test_weights_are_sent_under_hugging_face_names_without_a_copy(model_folder: Path) -> None:
    from safetensors.torch import load_file

    actor = make_actor(model_folder)
    sent = {name: (dtype, shape) for name, dtype, shape, _ in actor.named_tensors()}
    assert sent == {name: (dtype, shape) for name, dtype, shape in actor.named_shapes()}
    data = written(actor.named_tensors())
    on_disk = load_file(model_folder / "model.safetensors")
    assert sent.keys() == on_disk.keys()
    for name, (dtype, shape) in sent.items():
        assert dtype == "F32"
        assert shape == tuple(on_disk[name].shape)
        assert data[name] == on_disk[name].numpy().tobytes()
    # Nothing is copied before it is written.
    first = next(iter(actor.named_tensors()))
    with torch.no_grad():
        dict(actor.model.named_parameters())[first[0]].zero_()
    assert not any(written([first])[first[0]])
    config = json.loads(actor.config_json())
    assert (config["model_type"], config["dtype"], config["tie_word_embeddings"]) == ("llama", "float32", True)


def test_bfloat16_is_what_is_sent_and_float32_what_is_kept(model_folder: Path) -> None:
    actor = make_actor(model_folder, dtype="bfloat16")
    assert (
        {dtype for _, dtype, _, _ in actor.named_tensors()}
        == {dtype for _, dtype, _ in actor.named_shapes()}
        == {"BF16"}
    )
    data = written(actor.named_tensors())
    for name, tensor in actor.named_weights():
        assert data[name] == tensor.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert json.loads(actor.config_json())["dtype"] == "bfloat16"
    assert {tensor.dtype for _, tensor in actor.named_weights()} == {torch.float32}
    exact = make_actor(model_folder)
    batch = passes_of(10_000)[0]
    gap = (actor.logprobs(batch) - exact.logprobs(batch)).abs().max()
    assert 0 < float(gap) < 0.2
    assert gradients(actor, 10_000)[-1].dtype == torch.float32


def test_metrics_are_means_over_tokens(model_folder: Path) -> None:
    actor = make_actor(model_folder, kl_coef=0.1)
    actor.begin_step()
    for batch in passes_of(40):
        actor.accumulate(batch)
    metrics = actor.sums.means()
    (whole,) = passes_of(10_000)
    gap = (actor.logprobs(whole).cpu() - whole.rollout_logprobs_BT).abs()[whole.mask_BT].mean()
    assert metrics["rollout_logprob_gap"] == pytest.approx(float(gap), rel=1e-4)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert 0 < metrics["entropy"] < math.log(110)
    assert actor.sums.means() == {}


def test_activations_are_made_again_where_that_is_asked_for(model_folder: Path) -> None:
    actor = make_actor(model_folder, activation_checkpointing=True)
    seen: list[int] = []
    actor.model.model.layers[0].self_attn.register_forward_hook(lambda *_: seen.append(1))
    found = gradients(actor, 10_000)
    assert len(seen) == 2
    for mine, other in zip(found, gradients(make_actor(model_folder), 10_000), strict=True):
        torch.testing.assert_close(mine, other)


def test_the_threads_option_is_used(model_folder: Path) -> None:
    make_actor(model_folder, threads=2)
    assert torch.get_num_threads() == 2


def test_a_missing_model_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere/config\.json is missing"):
        make_actor(tmp_path / "nowhere")


def test_a_broken_weights_file_is_named(model_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_folder, tmp_path / "broken"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="broken holds no usable model"):
        make_actor(folder)


def test_missing_tensors_are_named(model_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(model_folder, tmp_path / "partial"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing.*model\.layers\.1\.mlp\.up_proj\.weight"):
        make_actor(folder)


def test_tensors_of_another_shape_are_refused(model_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_folder, tmp_path / "other"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    with pytest.raises(CheckpointError, match="other"):
        make_actor(folder)


def test_a_kind_of_model_that_nobody_knows_is_named(model_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_folder, tmp_path / "other"))
    (folder / "config.json").write_text(json.dumps({"model_type": "never-heard-of"}))
    with pytest.raises(CheckpointError, match=r"holds no usable model: .*never-heard-of"):
        make_actor(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not a Hugging Face model configuration"):
        make_actor(folder)


def test_devices_that_are_not_there_are_refused() -> None:
    assert pick_device("cpu").type == "cpu"
    assert pick_device("auto").type in ("cpu", "cuda")
    with pytest.raises(ConfigError, match="'gpu' is not a device"):
        pick_device("gpu")
    with pytest.raises(ConfigError, match="CUDA devices"):
        pick_device("cuda:99")
