"""The commands of `pellucid`: a dataclass each, whose fields are the options and whose call does the work.

A command checks what it can before torch is imported, and leaves the rest to the room that does it.
"""
