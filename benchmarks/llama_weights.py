"""The embedded model for llama.cpp, in bfloat16: what its file holds in four bits as we read it, all else as it is.

python benchmarks/llama_weights.py .venv-llama/smollm2-135m-bf16.gguf
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType, dequantize

from pellucid.policy.packaged import find_pieces

OWN = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
"""Fields that the writer sets itself."""


def main() -> None:
    [source] = find_pieces("smollm2-135m")
    written(source, Path(sys.argv[1]))


def written(source: Path, target: Path) -> None:
    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    for name, field in reader.fields.items():
        if not name.startswith(OWN):
            writer.add_key_value(name, field.contents(), field.types[0], *field.types[1:2])
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if values.dim() == 1:  # norms, which llama.cpp keeps in fp32
            writer.add_tensor(tensor.name, values.numpy())
            continue
        bits = values.to(torch.bfloat16).view(torch.uint8)
        writer.add_tensor(tensor.name, bits.numpy(), raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
