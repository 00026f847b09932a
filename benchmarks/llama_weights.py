"""Converts the embedded model from four bits to bf16, so that llama.cpp computes with the same weights as Pellucid.

    python benchmarks/llama_weights.py .venv-llama/smollm2-135m-bf16.gguf

Norms stay in fp32, and metadata is copied.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType, dequantize

from pellucid.policy.packaged import find_pieces

WRITER_FIELDS = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
"""The prefixes of fields that the writer sets itself."""


def main() -> None:
    [source] = find_pieces("smollm2-135m")
    convert(source, Path(sys.argv[1]))


def convert(source: Path, target: Path) -> None:
    """Write a GGUF file whose matrices are in bf16."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    for name, field in reader.fields.items():
        if not name.startswith(WRITER_FIELDS):
            writer.add_key_value(name, field.contents(), field.types[0], *field.types[1:2])
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if values.dim() == 1:  # llama.cpp keeps norms in fp32
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
