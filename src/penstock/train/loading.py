"""A model from its folder to where it is learned with: whole on a rank alone, and on several in shards from the start.

Decides how much of a folder's weights one of several ranks ever holds: its shards, and in passes what passes hold. The
model is made without weights and cut; then each rank reads its own parts of the safetensors files. Where the files'
tensors are not the model's own by name and shape (experts that transformers puts together, other formats), the leader
alone loads the model and sends it tensor by tensor. Refuses to know what is learned.
"""

from __future__ import annotations

import contextlib
import gc
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock.errors import CheckpointError, MissingExtra
from penstock.train.forward import refuse_other_heads
from penstock.train.packing import use_packing
from penstock.train.ranks import Ranks
from penstock.train.sharding import assign, layers_of, place
from penstock.train.shards import describe, fill

__all__ = ["load_causal_lm", "load_placed"]

M = TypeVar("M", bound=torch.nn.Module)
Places = Mapping[str, tuple[torch.nn.Module, str]]
"""Where each tensor of a model belongs, by the model's own name: a module, and the tensor's name there."""


def load_causal_lm(folder: Path) -> Any:
    """The float32 model of a folder, without dropout. Raises CheckpointError naming the folder and what is wrong."""
    model = _whole(folder)
    with _usable(folder):
        _settle(model)
    return model


def load_placed(
    folder: Path,
    make: Callable[[Any], M],
    ranks: Ranks,
    device: torch.device,
    dtype: str,
    *,
    cpu_offload: bool = False,
) -> M:
    """What `make` makes of the folder's float32 model (puts adapters in, a head on), on `device`, cut over the ranks.

    All ranks have to call it at the same time. `make` may put modules around and between the model's own, and freeze
    them; of several ranks it sees shapes and no weights. Raises CheckpointError, and as `place`.
    """
    if ranks.size == 1:
        module = make(load_causal_lm(folder))
        return place(module, layers_of(module), ranks, device, dtype, cpu_offload=cpu_offload)
    attention = _attention(folder, ranks, device, cpu_offload=cpu_offload)
    blank, places = _blank(folder, attention)
    # Adapters are made where the weights that they belong to lie: in host memory, so that their draws are as ever.
    _replace(places, lambda own: torch.empty((), dtype=own.dtype).expand(own.shape))
    module = make(blank)
    kept = set(module.modules())
    wanted = {name: where for name, where in places.items() if where[0] in kept}
    _replace(wanted, lambda own: torch.empty(own.shape, dtype=own.dtype, device="meta"))
    placed = place(module, layers_of(module), ranks, device, dtype, cpu_offload=cpu_offload)
    _fill(folder, blank, wanted, ranks, device, cpu_offload=cpu_offload)
    return placed


# ---- whole


def _whole(folder: Path) -> Any:
    """As transformers loads it."""
    from_folder = _auto(folder).from_pretrained
    with _usable(folder):
        model, report = from_folder(folder, dtype=torch.float32, local_files_only=True, output_loading_info=True)
    missing = sorted(report["missing_keys"]) + [str(key) for key in report.get("mismatched_keys", ())]
    if missing:
        raise CheckpointError(f"{folder}: weights are missing or of another shape: {', '.join(missing[:5])}")
    return model.eval()


def _auto(folder: Path) -> Any:
    """transformers' class of causal LMs. Raises MissingExtra, and CheckpointError for no model folder."""
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise MissingExtra("transformers", "train", "training") from error

    # A progress bar for a load of milliseconds would break the live view.
    disable_progress_bar()
    config_path = folder / "config.json"
    try:
        json.loads(config_path.read_text())["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{config_path} is missing or is not a Hugging Face model configuration") from error
    return AutoModelForCausalLM


@contextlib.contextmanager
def _usable(folder: Path) -> Iterator[None]:
    """transformers and safetensors raise whatever they meet; every kind of it means that a folder can't be used."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{folder} holds no usable model: {type(error).__name__}: {error}") from error


def _settle(model: Any) -> None:
    """Trial passes: how the model attends, and whether its logits are known."""
    use_packing(model)
    refuse_other_heads(model)


class _Trial(torch.nn.Module):
    """The unit that ranks cut for the trial passes."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self) -> None:
        with torch.no_grad():
            _settle(self.lm)


# ---- in shards


def _attention(folder: Path, ranks: Ranks, device: torch.device, *, cpu_offload: bool) -> str:
    """How the folder's kind of model attends, by trial passes: once for each kind, by all ranks together.

    They are float32's whatever the run computes in, and so of a model that is cut for them alone.
    """
    _auto(folder)
    kind = (folder / "config.json").read_text()
    if kind not in _TRIED:
        blank, places = _blank(folder)
        trial = place(_Trial(blank), layers_of(blank), ranks, device, "float32", cpu_offload=cpu_offload)
        _fill(folder, blank, places, ranks, device, cpu_offload=cpu_offload)
        with _usable(folder):
            trial()
        _TRIED[kind] = blank.config._attn_implementation
        del blank, places, trial
        # A cut model holds itself by references in a circle, and with it what its passes left.
        gc.collect()
    return _TRIED[kind]


_TRIED: dict[str, str] = {}
"""What models of a configuration, as it is written in config.json, attend by."""


def _blank(folder: Path, attention: str = "") -> tuple[Any, Places]:
    """The model without its weights: parameters on the meta device, buffers as the model itself computes them."""
    from transformers import AutoConfig

    auto = _auto(folder)
    with _usable(folder), _parameters_on_meta():
        model = auto.from_config(AutoConfig.from_pretrained(folder, local_files_only=True), dtype=torch.float32)
    if attention and model.config._attn_implementation != attention:
        model.set_attn_implementation(attention)
    places = {}
    for name in model.state_dict():
        module, _, key = name.rpartition(".")
        places[name] = (model.get_submodule(module), key)
    return model.eval(), places


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters that this thread makes have no memory once a module has them, as in accelerate's init_empty_weights.

    Not by making everything on the meta device: buffers that no file has would be nowhere too.
    """
    register, here = torch.nn.Module.register_parameter, threading.get_ident()

    def registered(module: torch.nn.Module, name: str, own: Parameter | None) -> None:
        if own is not None and not own.is_meta and threading.get_ident() == here:
            own = Parameter(own.detach().to("meta"), own.requires_grad)
        register(module, name, own)

    torch.nn.Module.register_parameter = registered  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def _replace(places: Places, made: Callable[[Parameter], Tensor]) -> None:
    """Puts what `made` makes of it in each parameter's place; one that has several names stays one."""
    done: dict[Parameter, Parameter] = {}
    for module, key in places.values():
        own = getattr(module, key)
        if isinstance(own, Parameter):
            if own not in done:
                done[own] = Parameter(made(own), own.requires_grad)
            setattr(module, key, done[own])


def _fill(folder: Path, model: Any, places: Places, ranks: Ranks, device: torch.device, *, cpu_offload: bool) -> None:
    """Gives this rank's shards memory, and what the folder has of them. Raises CheckpointError."""
    memory = torch.device("cpu") if cpu_offload else device
    _replace(places, lambda own: torch.empty_like(own, device=memory))
    tensors = {name: getattr(module, key) for name, (module, key) in places.items()}
    files = _safetensors(folder)
    names = _names_in(files, model, tensors) if files else None
    if names is not None:
        with _usable(folder):
            fill(files, {in_file: tensors[name] for name, in_file in names.items()})
    else:
        _receive(folder, tensors, ranks, device)


def _safetensors(folder: Path) -> list[Path]:
    """The folder's files of weights, where they are safetensors; else none. Raises CheckpointError."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is broken: {type(error).__name__}: {error}") from error


def _names_in(files: list[Path], model: Any, tensors: Mapping[str, Tensor]) -> dict[str, str] | None:
    """For each of the model's tensors one of its names, and its name in the files; None where they don't agree."""
    known = describe(files)
    prefix = f"{model.base_model_prefix}."
    found: dict[int, tuple[str, str]] = {}
    for name, tensor in tensors.items():
        # A backbone alone is saved without the model's name for it, and may be loaded with it.
        in_file = name if name in known else name.removeprefix(prefix)
        if in_file not in known:
            continue
        if id(tensor) in found or known[in_file].shape != tuple(tensor.shape):
            # Tied ones that the files have both may differ; transformers knows what then.
            return None
        found[id(tensor)] = (name, in_file)
    names = dict(found.values())
    if len(names) < len({id(tensor) for tensor in tensors.values()}) or _are_converted(model, names.values()):
        return None
    return names


def _are_converted(model: Any, names: Any) -> bool:
    """Whether transformers takes any of these tensors for something else than what it is named in the files."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        # Before version 5 tensors are what they are named.
        return False
    ways = get_model_conversion_mapping(model)
    return any(way.rename_source_key(name) != (name, None) for way in ways for name in names)


def _receive(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks, device: torch.device) -> None:
    """The leader loads the model as transformers does, and each tensor goes to all ranks in turn."""
    error, whole = "", {}
    if ranks.leads:
        try:
            whole = _whole(folder).state_dict(keep_vars=True)
            if unlike := _unlike(whole, tensors):
                error = f"{folder}: {unlike}"
        except CheckpointError as failure:
            error = str(failure)
    # All ranks fail alike, rather than wait for what nobody sends.
    if said := ranks.collect(error.encode())[0].decode():
        raise CheckpointError(said)
    sent: set[int] = set()
    for name, target in tensors.items():
        if id(target) in sent:
            continue
        sent.add(id(target))
        if ranks.leads:
            tensor = whole[name].detach().to(device)
        else:
            tensor = torch.empty(target.shape, dtype=target.dtype, device=device)
        torch.distributed.broadcast(tensor, 0)
        assign(target, tensor)


def _unlike(whole: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str:
    """Why a model that was loaded doesn't fit the one that its configuration describes, or nothing."""
    if lacking := sorted(tensors.keys() - whole.keys()):
        return f"weights are not those that config.json describes; there is no {', '.join(lacking[:5])}"
    for name, tensor in tensors.items():
        if whole[name].shape != tensor.shape or whole[name].dtype != tensor.dtype:
            return f"{name} is {whole[name].dtype} {tuple(whole[name].shape)}, and not what config.json describes"
    if len({id(whole[name]) for name in tensors}) != len({id(tensor) for tensor in tensors.values()}):
        return "tied weights are there twice and differ; set tie_word_embeddings to false in config.json"
    return ""
