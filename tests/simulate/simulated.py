"""A small run for tests: seconds of training, dozens of samples."""

from __future__ import annotations

from penstock.simulate.profiles import Lengths, MachineProfile, Prices, Profile, Training

MACHINE = MachineProfile(
    step_base_s=0.01,
    sequence_s=1e-4,
    context_s=1e-6,
    prefill_s_per_token=1e-5,
    max_running=32,
    kv_tokens=20_000,
    link_gbit_s=10.0,
    boot_s=2.0,
)


def small_profile(**changes: object) -> Profile:
    base: dict[str, object] = {
        "name": "small",
        "prompts": 16,
        "samples_per_prompt": 4,
        "weights_gb": 1.0,
        "store_gbit_s": 40.0,
        "reserved_instances": 2,
        "reserved": MACHINE,
        "spot": MACHINE,
        "training": Training(s_per_token=4e-4, optimizer_s=0.2, switch_s=0.3, micro_batch_samples=8),
        "prices": Prices(reserved=40.0, spot=3.0, on_demand=10.0),
        "lengths": Lengths(prompt_tokens=32, median_tokens=300, spread=0.6, max_tokens=900),
    }
    return Profile(**{**base, **changes})  # type: ignore[arg-type]
