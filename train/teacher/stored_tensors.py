"""Where the tensors of a module come from in a checkpoint's files, by the library's own renamings and conversions.

Files may have older names, and may hold one by one what the module holds as one tensor (the experts of a layer). The conversion
mapping of transformers says what becomes of them; here a rank follows it for its part of a module that is divided over ranks.
Beside the parts, at most one tensor of the module is held, and of experts only the rank's own.

Does not know: quantised tensors.
"""

from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass, field

import safetensors
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)


@dataclass
class Conversion:
    """Tensors of the files that together become one or more of the module's."""

    converter: WeightConverter
    target: str  # the name of the first of the module's
    sources: dict = field(default_factory=lambda: defaultdict(list))  # {pattern: its names in the files, in order}

    def convert(self, read, module, chosen=slice(None)):
        """{name in the module: tensor} of what read(name) gives; chosen: which sources of each pattern."""
        converter = deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names[chosen]:
                converter.add_tensor(self.target, name, pattern, lambda name=name: read(name))
        try:
            found = converter.convert(self.target, model=module, config=module.config)
        except (ValueError, RuntimeError, TypeError, KeyError, IndexError, AttributeError) as error:
            first = next(iter(self.sources.values()))[0]
            raise ValueError(f"{self.target} cannot be made of {first} and what belongs to it: {error}") from error
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in found.items()}

    @property
    def is_by_expert(self):
        """Whether entry i of its result depends only on source i of every pattern."""
        first, *rest = self.converter.operations
        return (
            type(first) is MergeModulelist
            and first.dim == 0
            and all(type(step) is Concatenate and step.dim > 0 for step in rest)
        )


class StoredTensors:
    """The tensors of all .safetensors of a folder, and what becomes of them in a module.

    module: a *ForCausalLM without weights; paths: the files. `names`: {name in the module: name in the files} of tensors that are
    taken as they are; `conversions`: the others. Raises ValueError for files that cannot be read and tensors that do not fit.
    """

    def __init__(self, module, paths):
        self.module, self.files, self.shapes = module, {}, {}
        for path in sorted(paths):
            try:
                file = safetensors.safe_open(path, "pt")  # stays open, and nothing is read yet
                for name in file.keys():  # noqa: SIM118 - the file is no dict
                    self.files[name], self.shapes[name] = file, file.get_slice(name).get_shape()
            except safetensors.SafetensorError as error:
                raise ValueError(f"{path} cannot be read: {error}; copy or download the model again") from error
        self.names, self.conversions = self._find()
        self.made = {}  # {name in the module: its shape} of all that are converted
        for conversion in self.conversions:
            made = conversion.convert(lambda name: torch.empty(self.shapes[name], device="meta"), module)
            self.made |= {name: tensor.shape for name, tensor in made.items()}

    def _find(self):
        """Follow the library: every name is renamed, then taken by at most one converter."""
        held = self.module.state_dict()
        steps = get_model_conversion_mapping(self.module)
        renamings = [step for step in steps if isinstance(step, WeightRenaming)]
        converters = [step for step in steps if isinstance(step, WeightConverter)]
        converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        names, conversions = {}, {}
        for name in sorted(self.files, key=dot_natural_key):  # experts in the order of their numbers
            prefix = dict(base_model_prefix=self.module.base_model_prefix, meta_state_dict=held)
            target, pattern = rename_source_key(name, renamings, converters, **prefix)
            if target not in held and name in held:  # a renaming for older files caught a newer name
                target, pattern = rename_source_key(name, [], [], **prefix)
            if target not in held:
                continue
            if pattern is None:
                names[target] = name
                continue
            conversion = conversions.setdefault(target, Conversion(converter_of[pattern], target))
            conversion.sources[pattern].append(name)
        return names, list(conversions.values())

    def read(self, name):
        """A tensor of the files."""
        return self.files[name].get_tensor(name)

    @torch.no_grad()
    def load_converted(self, tensors):
        """Fill those of the module's tensors {name: tensor} that are converted; of a divided one this rank fills its part."""
        for conversion in self.conversions:
            mine = slice(None)
            if conversion.is_by_expert:  # has one result
                place = tensors[conversion.target]
                mine = part_of_rank(place)
                if mine.start == mine.stop:
                    continue
            for name, found in conversion.convert(self.read, self.module, mine).items():
                place = tensors[name]
                part = found if conversion.is_by_expert else found[part_of_rank(place)]
                (place.to_local() if isinstance(place, DTensor) else place).copy_(part)


def part_of_rank(tensor):
    """The slice of dimension 0 that this rank holds of a tensor: all of it, unless FSDP2 divided it."""
    if not isinstance(tensor, DTensor):
        return slice(0, len(tensor))
    each = -(-len(tensor) // dist.get_world_size())
    start = min(dist.get_rank() * each, len(tensor))
    return slice(start, start + len(tensor.to_local()))
