"""Write a linearized model to a folder, and read it again: the same outputs, to the bit."""

import os
import warnings
from pathlib import Path

import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import linattn
from linattn.hf import _model_records
from linattn.hf._attention_modules import AttentionModule, attention_modules, unwrapped
from linattn.hf._choosing import refuse_merged_decoder
from linattn.hf._dispatch import install
from linattn.hf._folders import bring_back, softmax_model, write_files
from linattn.hf._model_records import RECORD, REMEDY, LayerRecord, ModelRecord, rebuild_attention
from linattn.hf.layer_attention import ATTRIBUTE, LayerAttention
from linattn.hf.linearization import is_linearized, try_out
from linattn.hf.loading import quiet
from linattn.records.files import atomic_folder


def save_pretrained(
    model: PreTrainedModel, folder: str | os.PathLike[str], *, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Write a linearized model to a new folder, which appears whole or not at all.

        from_pretrained(folder) has the model's numbers, and in evaluation mode its outputs, to the bit

    The folder is a plain one of transformers but for its config.json, which names an attention that transformers does
    not have: its own classes refuse the folder and point here, or, told AutoModel.from_pretrained(folder,
    attn_implementation="sdpa"), load the softmax model. linattn.safetensors holds the tensors of the linear attention
    and what else transformers would not bring back, linattn.json which layer attends by what. A map that several layers
    share becomes one map for each. The model's own `save_pretrained`, which trainers call, writes these two files too.

    Cost: writing the weights.

    Args:
        model: a model that `linattn.hf.linearize_` changed, on any device.
        folder: where to write; nothing, or an empty folder.
        tokenizer: written beside the model, if given.

    Raises:
        ValueError: if the model is not linearized, its class is not one that transformers exports, or a map is of a
            class that is not linattn's own.
        FileExistsError: if `folder` exists and is not an empty folder.
        OSError: if it cannot be written. Whatever ends the writing early leaves nothing under the name.

    Example:
        >>> import tempfile
        >>> from transformers import BertConfig, BertModel
        >>> from linattn.hf import linearize_
        >>> sizes = dict(vocab_size=9, hidden_size=4, num_hidden_layers=2, num_attention_heads=2, intermediate_size=4)
        >>> model = BertModel(BertConfig(**sizes))
        >>> _ = linearize_(model, method="Taylor(order=2)", layers=[1])
        >>> folder = Path(tempfile.mkdtemp()) / "linear"
        >>> save_pretrained(model, folder)
        >>> sorted(path.name for path in folder.iterdir())
        ['config.json', 'linattn.json', 'linattn.safetensors', 'model.safetensors']
        >>> from_pretrained(folder).encoder.layer[1].attention.self.linear_attention.feature_map
        Taylor(head_dim=2, order=2, scale=0.7071067811865476)

    Source: transformers' documentation, "Loading models"; the format of safetensors.
    """
    with atomic_folder(Path(folder).expanduser().resolve()) as temporary:
        write_linearized(model, temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)


def from_pretrained(folder: str | os.PathLike[str]) -> PreTrainedModel:
    """Read a folder that `save_pretrained`, or a linearized model's own method of that name, wrote.

    The model has the class and the dtypes it was saved with, is on the CPU and in evaluation mode, and is linearized
    alike. One whose weights transformers had mapped from a file, where they may lie in memory otherwise than torch
    allocates them, is the same to rounding. Nothing is taken from the network, and no code from the folder.

    Cost: reading the weights, and building the maps.

    Raises:
        FileNotFoundError: if linattn.json is missing (the folder has no linearized model), its tensors or the weights.
        ValueError: if linattn.json is no JSON, of another format version, or does not agree with the weights, with
            linattn.safetensors or with the model that transformers builds; a file asks for what no folder written here
            does: code of a hub, files elsewhere, sizes beyond any model's; or it holds a decoder with merged keys: a
            `BoundedCache` merges them, and the error says how.

    Warns:
        UserWarning: if another version of linattn wrote the folder; the model is read nonetheless.
    """
    path = Path(folder).expanduser()
    record = _model_records.read(path)
    if record.linattn != linattn.__version__:
        warnings.warn(
            f"{path} was saved by linattn {record.linattn} and is read by linattn {linattn.__version__}: the format is "
            "the same, and so should the outputs be; save the model again to go on without this warning",
            UserWarning,
            stacklevel=2,
        )
    tensors = _model_records.read_tensors(path, record)
    model = softmax_model(path, record)
    attentions = [(part, _attention(part, layer, path, tensors)) for part, layer in _pairs(model, record, path)]
    for part, attention in attentions:
        refuse_merged_decoder(model, part, attention.merged, path)
        try_out(part, attention, attention.summary)
    bring_back(model, tensors, path)
    install(model, attentions)
    model.eval()
    return model


def write_linearized(model: PreTrainedModel, folder: Path) -> None:
    """The files of a linearized model, into a folder that exists; nothing is written before everything is checked."""
    model = unwrapped(model)
    if not is_linearized(model):
        raise ValueError(
            f"{type(model).__name__} is not linearized; call linearize_ on it first, or its own save_pretrained"
        )
    with quiet():
        write_files(model, folder, None)


def _pairs(model: PreTrainedModel, record: ModelRecord, path: Path) -> list[tuple[AttentionModule, LayerRecord]]:
    """Each recorded layer with its attention module."""
    modules, place = list(attention_modules(model)), path / RECORD
    if len(modules) != record.num_layers:
        raise ValueError(
            f"{place} was written for {record.num_layers} attention layers, {record.model_class} has {len(modules)} "
            f"with transformers {transformers.__version__}; {REMEDY}"
        )
    names = {part.number: part.name for part in modules}
    numbers = [layer.number for layer in record.layers]
    for layer in record.layers:
        if names.get(layer.number) != layer.module_name or numbers.count(layer.number) > 1:
            raise ValueError(
                f"{place}: layer {layer.number} is {layer.module_name} there and {names.get(layer.number)} in "
                f"{record.model_class}, each once; {REMEDY}"
            )
    return [(modules[layer.number], layer) for layer in record.layers]


def _attention(part: AttentionModule, layer: LayerRecord, path: Path, tensors: dict[str, Tensor]) -> LayerAttention:
    """One layer's attention with its tensors, which are taken out of `tensors`."""
    place, prefix = f"{path / RECORD}, layer {layer.number}", f"{part.name}.{ATTRIBUTE}."
    attention = rebuild_attention(layer.kernel, part.name, place)
    layer_tensors = {name: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    try:
        # Assigned, not copied into what the constructor made: dtypes are those that were saved.
        attention.load_state_dict({name.removeprefix(prefix): x for name, x in layer_tensors.items()}, assign=True)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{place}: {error}; {REMEDY}") from error
    return attention
